import torch

from coterie.jobs.side_spec import SideSpec
from coterie.sidetuning.side_network import SideNetwork

SPEC = SideSpec(rank=3)


def test_a_new_network_adds_exactly_nothing():
    network = SideNetwork(4, 6, SPEC, seed=1)
    taps = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))
    assert not network(taps).any()


def test_starting_values_follow_from_seed_and_name_alone():
    whole, high = SideNetwork(4, 6, SPEC, seed=1), SideNetwork(4, 6, SideSpec(rank=3, first_layer=3), seed=1)
    assert torch.equal(whole.down["3"].weight, high.down["3"].weight)
    assert not torch.equal(whole.down["3"].weight, whole.down["4"].weight)
    assert not torch.equal(whole.down["3"].weight, SideNetwork(4, 6, SPEC, seed=2).down["3"].weight)
    torch.manual_seed(5)
    again = SideNetwork(4, 6, SPEC, seed=1).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.state_dict().items())


def test_making_one_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    SideNetwork(2, 6, SPEC, seed=1)
    assert torch.equal(torch.rand(3), wanted)


def test_its_names_and_shapes_are_those_that_exports_rely_on():
    shapes = {name: tuple(tensor.shape) for name, tensor in SideNetwork(3, 6, SPEC, seed=1).state_dict().items()}
    wanted = {"output_gate": (), "gates.2": (), "gates.3": ()}
    for layer in (1, 2, 3):
        wanted |= {f"norms.{layer}.weight": (6,), f"norms.{layer}.bias": (6,)}
        wanted |= {f"down.{layer}.weight": (3, 6), f"up.{layer}.weight": (6, 3)}
    assert shapes == wanted


def test_tokens_do_not_see_each_other():
    network = SideNetwork(3, 6, SPEC, seed=1).double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw))
    taps = torch.randn(4, 3, 6, generator=draw, dtype=torch.float64)
    other = taps.clone()
    other[1:] += 1
    with torch.no_grad():
        assert torch.equal(network(taps)[0], network(other)[0])
        assert not torch.equal(network(taps)[1], network(other)[1])
