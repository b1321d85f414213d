"""Text by stages is the text of transformers' own `generate` on the whole model, for every family and ragged prompts.

Each tiny random model is saved, loaded whole by `from_pretrained`, and built stage by stage from the same folder. All
stages are asked for the same, as the coordinator does; nothing is shared but what would cross a link.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from coterie.coordinator.prompt_groups import Prompts
from coterie.jobs.generation_spec import GenerationSpec
from coterie.models import FolderWeights, build_stage, make_forward_spec, open_model
from coterie.models.frozen_weights import PackedWeights
from coterie.models.generation import GenerationStage
from coterie.models.whole import load_whole_model
from coterie.pipeline.sampling import next_tokens
from coterie.tasks.examples import Example

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = {**BASE, **SPECIAL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OPT = {"ffn_dim": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61, **SPECIAL}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
LONG = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 11,
    "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 11},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "llama 9/3 heads": ("llama", {**GROUPED, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}),
    "opt": ("opt", {**OPT, "word_embed_proj_dim": 32}),
    "opt-350m shape": ("opt", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", HEADS),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 4}),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", {**HEADS, "sliding_window": 4}),
    "gemma3": ("gemma3_text", {**HEADS, "sliding_window": 4, "layer_types": MIXED}),
    "phi": ("phi", {**BASE, **SPECIAL}),
    "phi3": ("phi3", {**BASE, **SPECIAL}),
    "phi3 beyond its first context": ("phi3", {**BASE, **SPECIAL, **LONG}),
    "gpt_neox": ("gpt_neox", {**BASE, **SPECIAL}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}),
    "falcon": ("falcon", {**BASE, **SPECIAL}),
    "falcon alibi": ("falcon", {**BASE, **SPECIAL, "alibi": True, "new_decoder_architecture": False}),
    "olmo2": ("olmo2", {**BASE, **SPECIAL}),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layer_interval": 2}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 3}),
    "granite": ("granite", GROUPED),
    "gpt_oss": ("gpt_oss", {**HEADS, "num_local_experts": 4, "sliding_window": 4}),
    "lfm2": ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 61, **SPECIAL}),
}
"""A name, its model type and its tiny config; five units each."""

CUTS = {"whole": (0, 5), "two": (0, 2, 5), "three": (0, 1, 3, 5), "ends alone": (0, 1, 4, 5)}
NEW_TOKENS = 7


def prompts(*lengths: int) -> tuple[Tensor, Tensor | None]:
    """Random prompts padded on the left."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 61, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    ids[mask == 0] = 0
    return ids, None if mask.all() else mask


class Family:
    """One saved tiny model."""

    def __init__(self, kind: str, settings: dict[str, Any], folder: Path) -> None:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
        self.folder = folder
        source = open_model(folder)
        self.spec = make_forward_spec(source, auto_class="AutoModelForCausalLM")
        self.weights = FolderWeights(source, self.spec)
        self.whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def stages(self, cuts: tuple[int, ...]) -> list[GenerationStage]:
        return [GenerationStage(build_stage(self.spec, a, b, self.weights)) for a, b in itertools.pairwise(cuts)]

    def generate(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """What transformers writes: tokens [B, N] and their logits [N, B, V]."""
        done = self.whole.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return done.sequences[:, ids.shape[1] :], torch.stack(done.logits)


def write(
    stages: list[GenerationStage], ids: Tensor, mask: Tensor | None, spec: GenerationSpec
) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and logits [N, B, V] by stages; as where data stay local, those between the ends get no ids."""
    knows = [stage.stage.is_first or stage.stage.is_last for stage in stages]
    groups = [
        stage.begin(ids if told else torch.zeros_like(ids), mask, spec.max_new_tokens)
        for stage, told in zip(stages, knows, strict=True)
    ]
    tokens, logits = [], []
    for position in range(spec.max_new_tokens):
        hidden: Tensor | None = None
        for stage, group in zip(stages, groups, strict=True):
            hidden = stage.forward(group, None if hidden is None else hidden.clone())
        assert hidden is not None
        logits.append(hidden)
        tokens.append(next_tokens(hidden, spec, rows=range(len(ids)), position=position))
        for group, told in zip(groups, knows, strict=True):
            group.append(tokens[-1] if told else torch.zeros_like(tokens[-1]))
    return torch.stack(tokens, dim=1), torch.stack(logits)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    transformers.logging.set_verbosity_error()
    return Family(*FAMILIES[request.param], tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("cuts", "lengths"), [("three", (9, 3, 6)), ("ends alone", (6, 6))])
def test_stages_write_what_generate_writes(family: Family, cuts: str, lengths: tuple[int, ...]) -> None:
    ids, mask = prompts(*lengths)
    expected, expected_logits = family.generate(ids, mask)
    found, logits = write(family.stages(CUTS[cuts]), ids, mask, GenerationSpec(max_new_tokens=NEW_TOKENS))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert found.tolist() == expected.tolist()


def test_drawn_tokens_do_not_depend_on_the_cut(family: Family) -> None:
    ids, mask = prompts(9, 3, 6)
    spec = GenerationSpec(max_new_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=11)
    whole, two, three = (write(family.stages(CUTS[name]), ids, mask, spec)[0] for name in ("whole", "two", "three"))
    assert whole.tolist() == two.tolist() == three.tolist()
    greedy, _ = write(family.stages(CUTS["two"]), ids, mask, GenerationSpec(max_new_tokens=NEW_TOKENS))
    assert greedy.tolist() != whole.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_weights_held_in_fewer_bits_write_what_the_whole_model_with_them_writes(tmp_path: Path, dtype: str) -> None:
    family = Family("llama", {**GROUPED, "hidden_size": 64, "intermediate_size": 64}, tmp_path)
    source = open_model(tmp_path)
    spec = make_forward_spec(source, auto_class="AutoModelForCausalLM", frozen_dtype=dtype)
    plain = family.generate(*prompts(9, 3, 6))[1]
    family.whole = load_whole_model(spec, family.weights, use_cache=True).eval()
    ids, mask = prompts(9, 3, 6)
    expected, expected_logits = family.generate(ids, mask)
    packed = PackedWeights(family.weights, spec)
    stages = [GenerationStage(build_stage(spec, a, b, packed)) for a, b in itertools.pairwise(CUTS["three"])]
    found, logits = write(stages, ids, mask, GenerationSpec(max_new_tokens=NEW_TOKENS))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert found.tolist() == expected.tolist()
    assert not torch.equal(plain[0], logits[0])


def test_rows_end_at_any_of_the_end_tokens_as_in_generate(tmp_path: Path) -> None:
    family = Family(*FAMILIES["llama"], tmp_path)
    lengths = (9, 3, 6)
    ids, mask = prompts(*lengths)
    free, _ = family.generate(ids, mask)
    ends = [free[0, 2].item(), free[1, 4].item()]
    limit = GenerationSpec(max_new_tokens=NEW_TOKENS)
    rows = tuple(row[len(row) - length :].numpy() for row, length in zip(ids, lengths, strict=True))
    (group,) = Prompts(examples=(Example(),) * 3, ids=rows, stop_ids=frozenset(ends), pad_id=0, spec=limit).groups(3)
    (stage,) = family.stages(CUTS["whole"])
    first, padding = group.start()
    kept = stage.begin(torch.from_numpy(first), torch.from_numpy(padding), NEW_TOKENS)
    while not group.is_done:
        group.take(next_tokens(stage.forward(kept, None), limit, rows=group.rows, position=group.position).numpy())
        kept.append(torch.from_numpy(group.newest[:, 0].copy()))
    written = family.whole.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0
    )[:, 9:]
    assert written.shape[1] == group.position
    for row, tokens in zip(group.rows, group.generated, strict=True):
        assert [*tokens, *[0] * (group.position - len(tokens))] == written[row].tolist()
    assert min(map(len, group.generated)) < NEW_TOKENS
