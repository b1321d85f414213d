import pytest

from coterie.errors import UsageError
from coterie.transport.control_link import control_link, parse_control_link
from coterie.transport.pinned_https import Endpoint

FINGERPRINT = "0123456789abcdef" * 4
SECRET = "s3cret-token_value"
ENDPOINT = Endpoint(hosts=("192.168.1.5", "fd00::2"), port=7878, fingerprint=FINGERPRINT, token=SECRET)


def test_a_control_link_survives_its_own_text_and_is_told_from_a_join_link() -> None:
    text = control_link(ENDPOINT)
    assert text == f"coterie-control://192.168.1.5:7878/?fp={FINGERPRINT}&host=fd00::2#{SECRET}"
    assert parse_control_link(f" {text}\n") == ENDPOINT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"coterie://h:1/?fp={FINGERPRINT}#{SECRET}", "a join link: it lets a device join, and nobody control"),
        ("runs/latest", "begins with coterie-control://, not 'runs/latest'"),
        (f"coterie-control://h:1/?fp={FINGERPRINT}", "the control link has no token"),
        (f"coterie-control://h/?fp={FINGERPRINT}#{SECRET}", "the control link names no host or no port"),
    ],
)
def test_a_text_that_is_no_control_link_is_refused_with_the_part_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        parse_control_link(text)
    assert "--show-link" in caught.value.hint
    assert SECRET not in caught.value.message
