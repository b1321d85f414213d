import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import JoinRefusedError, UsageError
from coterie.transport.join_link import JoinLink, JoinTokens, digest_of

FINGERPRINT = "0123456789abcdef" * 4
SECRET = "s3cret-token_value"
HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9\-]{0,10}[a-z0-9])?(\.[a-z]{2,5})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


@given(
    hosts=st.lists(HOSTS, min_size=1, max_size=5).map(tuple),
    port=st.integers(1, 65535),
    fingerprint=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    token=st.from_regex(r"[A-Za-z0-9_\-]{8,60}", fullmatch=True),
)
def test_a_link_survives_its_own_text(hosts: tuple[str, ...], port: int, fingerprint: str, token: str) -> None:
    link = JoinLink(hosts=hosts, port=port, fingerprint=fingerprint, token=token)
    assert JoinLink.from_text(link.to_text()) == link


def test_the_text_reads_as_documented_and_ends_with_the_token() -> None:
    link = JoinLink(hosts=("192.168.1.5", "fd00::2", "pc.lan"), port=7878, fingerprint=FINGERPRINT, token=SECRET)
    assert link.to_text() == f"coterie://192.168.1.5:7878/?fp={FINGERPRINT}&host=fd00::2&host=pc.lan#{SECRET}"


def test_a_fingerprint_as_openssl_prints_it_is_understood() -> None:
    colons = ":".join(FINGERPRINT[i : i + 2] for i in range(0, 64, 2)).upper()
    assert JoinLink.from_text(f" coterie://h:1/?fp={colons}#{SECRET}\n").fingerprint == FINGERPRINT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with coterie://"),
        (f"https://h:1/?fp={FINGERPRINT}#{SECRET}", "begins with coterie://, not 'https'"),
        (f"coterie://h/?fp={FINGERPRINT}#{SECRET}", "no host or no port"),
        (f"coterie://:1/?fp={FINGERPRINT}#{SECRET}", "no host or no port"),
        (f"coterie://h:99999/?fp={FINGERPRINT}#{SECRET}", "cannot be read"),
        (f"coterie://h:abc/?fp={FINGERPRINT}#{SECRET}", "cannot be read"),
        (f"coterie://[::g]:1/?fp={FINGERPRINT}#{SECRET}", "IPv6|cannot be read"),
        (f"coterie://a b:1/?fp={FINGERPRINT}#{SECRET}", "host 'a b' is no host name"),
        (f"coterie://h:1/?fp={FINGERPRINT}&host=a/b#{SECRET}", "host 'a/b' is no host name"),
        (f"coterie://h:1/#{SECRET}", "no fingerprint"),
        (f"coterie://h:1/?fp=#{SECRET}", "no fingerprint|cannot be read"),
        (f"coterie://h:1/?fp=1234#{SECRET}", "'1234' is not a certificate fingerprint"),
        (f"coterie://h:1/?fp={FINGERPRINT}&fp={FINGERPRINT}#{SECRET}", "no fingerprint"),
        (f"coterie://h:1/?fp={FINGERPRINT}", "no token"),
        (f"coterie://h:1/?fp={FINGERPRINT}#short", "characters that no token has"),
        (f"coterie://h:1/?fp={FINGERPRINT}#a token with blanks", "characters that no token has"),
    ],
)
def test_a_text_that_is_no_join_link_is_refused_with_the_part_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        JoinLink.from_text(text)
    assert caught.value.hint


@given(text=st.text(max_size=80), prefix=st.sampled_from(["", "coterie://", "coterie://h:1/?fp="]))
def test_any_text_is_either_a_link_or_refused(text: str, prefix: str) -> None:
    with contextlib.suppress(UsageError):
        JoinLink.from_text(prefix + text)


def test_printing_a_link_does_not_show_its_token() -> None:
    link = JoinLink(hosts=("h",), port=1, fingerprint=FINGERPRINT, token=SECRET)
    assert SECRET not in repr(link)
    assert SECRET not in f"{link}"


def test_a_token_is_good_for_as_many_workers_as_it_was_issued_for() -> None:
    tokens = JoinTokens()
    token = tokens.issue(uses=2)
    tokens.redeem(token)
    tokens.redeem(token)
    with pytest.raises(JoinRefusedError, match="used up"):
        tokens.redeem(token)
    tokens.give_back(digest_of(token))
    tokens.redeem(token)


def test_a_wrong_token_is_refused_and_takes_no_use_of_a_right_one() -> None:
    tokens = JoinTokens()
    token = tokens.issue()
    for wrong in ("", token[:-1], token + "A", "\ud800", "x" * 10_000):
        with pytest.raises(JoinRefusedError, match="not known"):
            tokens.redeem(wrong)
        tokens.give_back(digest_of(wrong))
    tokens.redeem(token)


def test_tokens_differ_fit_into_a_link_and_are_not_kept_in_clear() -> None:
    tokens = JoinTokens()
    issued = {tokens.issue() for _ in range(200)}
    assert len(issued) == 200
    assert not [token for token in issued if token.startswith("-")], "a command line takes it for a flag"
    for token in issued:
        link = JoinLink(hosts=("h",), port=1, fingerprint=FINGERPRINT, token=token)
        assert JoinLink.from_text(link.to_text()).token == token
        assert token not in repr(vars(tokens))
