"""A split stage equals the unsplit one: outputs, dX and every weight's gradient, for every family, mask and dropout."""

TOLERANCE = 5e-6


def test_a_split_stage_equals_float64(heads, pool, family):
    model = heads.model(family)
    split, reference = model.stage(), heads.in_float64(model.stage())
    split.eval()
    report = heads.split(split, pool)
    assert report.attention == report.neurons == (0, 1)
    assert not report.unsplit
    for lengths in (None, (7, 4, 2)):
        inputs = model.inputs(lengths=lengths)
        assert heads.run(split, model, inputs).difference(heads.run(reference, model, inputs)) < TOLERANCE, lengths


def test_a_split_stage_drops_what_the_unsplit_one_drops(heads, pool, family):
    model = heads.model(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    split, unsplit = model.stage(), model.stage()
    heads.split(split, pool)
    got, expected = heads.run(split, model, inputs), heads.run(unsplit, model, inputs)
    assert got.difference(expected) < TOLERANCE
    unsplit.eval()
    assert heads.run(unsplit, model, inputs).difference(expected) > 0.01, "nothing was dropped"
