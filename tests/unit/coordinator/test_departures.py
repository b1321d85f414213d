"""Who is to leave, and who could not be spared."""

from coterie.coordinator.departures import Departure, Departures
from coterie.ids import WorkerId


def departure(name):
    return Departure(worker=WorkerId(name), device_name=name, cause="leaving", reason="its owner needs it")


def test_a_wish_is_heard_once():
    departures = Departures()
    assert departures.add(departure("phone"))
    assert not departures.add(departure("phone"))
    assert departures.workers == {"phone"}


def test_who_could_not_be_spared_is_asked_about_again_when_somebody_joins():
    departures = Departures()
    departures.add(departure("phone"))
    departures.refuse()
    assert departures.due == ()
    assert not departures.add(departure("phone")), "it says so at every heartbeat"
    departures.somebody_joined()
    assert [found.device_name for found in departures.due] == ["phone"]


def test_who_is_gone_is_forgotten():
    departures = Departures()
    departures.add(departure("phone"))
    departures.refuse()
    departures.forget(WorkerId("phone"))
    departures.somebody_joined()
    assert departures.due == ()


def test_why_a_device_is_to_leave_is_known_whether_it_can_be_spared_or_not():
    departures = Departures()
    phone = departure("phone")
    departures.add(phone)
    assert departures.of(phone.worker) == phone
    departures.refuse()
    assert departures.of(phone.worker) == phone
    departures.forget(phone.worker)
    assert departures.of(phone.worker) is None
