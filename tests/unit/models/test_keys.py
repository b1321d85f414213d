import torch

from coterie.models.keys import RandomKey, seed_for, seed_for_name, seed_generators


def test_a_seed_is_the_same_on_every_machine_and_in_every_release() -> None:
    assert seed_for(RandomKey(seed=1, step=2, micro_batch=3), 4) == 7597657864365363701
    assert seed_for_name(1, "classifier.weight") == 193089997412120258


def test_every_part_of_the_key_and_the_unit_change_the_seed() -> None:
    key = RandomKey(seed=1, step=2, micro_batch=3)
    seeds = {
        seed_for(key, 4),
        seed_for(key, 5),
        seed_for(key._replace(seed=2), 4),
        seed_for(key._replace(step=3), 4),
        seed_for(key._replace(micro_batch=4), 4),
        seed_for(RandomKey(seed=2, step=1, micro_batch=3), 4),
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_negative_and_large_seeds_are_taken() -> None:
    assert seed_for(RandomKey(seed=-1, step=2**40, micro_batch=0), 0) >= 0


def test_seeding_the_generators_fixes_what_dropout_draws() -> None:
    cpu = torch.device("cpu")
    seed_generators(11, cpu)
    first = torch.nn.functional.dropout(torch.ones(100), 0.5)
    torch.rand(7)
    seed_generators(11, cpu)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100), 0.5), first)
