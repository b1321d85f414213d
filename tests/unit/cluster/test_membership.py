"""Membership as pure functions, with literals."""

from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster.membership import ClusterState, DeclareLost, Heard, Joined, Left, MemberState, apply, decide
from coterie.ids import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def after(*events):
    state = ClusterState()
    for event in events:
        state = apply(state, event)
    return state


def test_a_worker_that_joins_is_in():
    assert after(Joined(worker=A, at_s=1.0)).members == (MemberState(worker=A, last_heard_s=1.0),)


def test_a_worker_that_joins_twice_is_in_once():
    assert after(Joined(worker=A, at_s=1.0), Joined(worker=A, at_s=5.0)).members == (
        MemberState(worker=A, last_heard_s=5.0),
    )


def test_news_of_a_worker_that_left_changes_nothing():
    assert after(Joined(worker=A, at_s=1.0), Left(worker=A), Heard(worker=A, at_s=2.0)).members == ()


def test_late_news_never_turns_the_clock_back():
    state = after(Joined(worker=A, at_s=1.0), Heard(worker=A, at_s=9.0), Heard(worker=A, at_s=4.0))
    assert state.members[0].last_heard_s == 9.0


def test_only_the_silent_worker_is_declared_lost():
    state = after(Joined(worker=A, at_s=0.0), Joined(worker=B, at_s=0.0), Heard(worker=B, at_s=25.0))
    assert decide(state, 31.0, 30.0) == (DeclareLost(worker=A, silent_s=31.0),)
    assert decide(state, 30.0, 30.0) == ()


EVENTS = st.lists(
    st.one_of(
        st.builds(Joined, worker=st.sampled_from([A, B]), at_s=st.floats(0, 100)),
        st.builds(Heard, worker=st.sampled_from([A, B]), at_s=st.floats(0, 100)),
        st.builds(Left, worker=st.sampled_from([A, B])),
    )
)


@given(EVENTS)
def test_every_worker_is_in_at_most_once_whatever_happens(events):
    workers = [member.worker for member in after(*events).members]
    assert len(workers) == len(set(workers))


@given(EVENTS, st.floats(0, 200), st.floats(0, 50))
def test_who_is_declared_lost_is_a_member_and_silent_for_longer_than_the_limit(events, now_s, limit_s):
    state = after(*events)
    for command in decide(state, now_s, limit_s):
        assert command.worker in {member.worker for member in state.members}
        assert command.silent_s > limit_s
