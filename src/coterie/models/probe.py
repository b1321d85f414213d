"""One forward of the empty model, to see what its code uses before and after the blocks; no per-family knowledge.

Every block is replaced by a stub, parameters and inputs are on the meta device (shapes only), and each operation is
watched for the parameters that it takes. What does not behave as a chain of blocks is refused here, before training.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.errors import UnsupportedModelError
from coterie.models.source import SUPPORTED
from coterie.models.stubs import BlockOutput, BlockStub, StubForm, hidden_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BEFORE, BETWEEN, AFTER = 0, 1, 2
_ROWS, _TOKENS = 2, 3


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What the forward showed.

    Attributes:
        form: What the model's loop takes from a block.
        phases: Per parameter name (all names of tied ones), when operations used it: before, between, after blocks.
        slot_phases: Per parameter name, when the module that holds it was called.
        blocks_read_ids: Whether blocks are given something that depends on token ids beside the hidden states.
    """

    form: StubForm
    phases: Mapping[str, frozenset[int]]
    slot_phases: Mapping[str, frozenset[int]]
    blocks_read_ids: bool


class _NotAChainError(Exception):
    """The model's loop does not accept this form of stub, or is not a loop over its blocks."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class is untyped
    """Notes which parameters operations take, and in which phase; and what was made from token ids."""

    def __init__(self, parameters: Mapping[int, int], phase: Callable[[], int], ids: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's class is untyped
        self._groups = parameters
        self._phase = phase
        self.used: defaultdict[int, set[int]] = defaultdict(set)
        # By identity, and held so that no other tensor gets one of these identities.
        self._from_ids: dict[int, torch.Tensor] = {id(ids): ids}

    def is_from_ids(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor depend on those of the token ids."""
        return id(tensor) in self._from_ids

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation; a question about values ("is any token padded?") is answered yes, there are none."""
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - `Tensor.item`
            return True
        depends = False
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._groups:
                self.used[self._groups[id(leaf)]].add(self._phase())
            depends = depends or (isinstance(leaf, torch.Tensor) and self.is_from_ids(leaf))
        result = func(*args, **(kwargs or {}))
        if depends and not _only_shape(str(func)):
            self._from_ids |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def _only_shape(operation: str) -> bool:
    """Whether an operation takes of a tensor its shape and type alone, such as `aten.zeros_like.default`."""
    name = operation.split(".")[1]
    return name.endswith("_like") or name.startswith("new_")


class _Chain:
    """Stubs for all blocks that check the order of their calls and what they are given."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self.model_name = type(model).__name__
        self.count = len(blocks)
        self.called: list[int] = []
        self.shape: torch.Size | None = None
        self.is_from_ids: Callable[[torch.Tensor], bool] = lambda _tensor: False
        self.read_ids = False
        self.border = 0
        """Number of the autograd operation that made the last block's result."""

    @property
    def phase(self) -> int:
        if not self.called:
            return BEFORE
        return AFTER if len(self.called) >= self.count else BETWEEN

    def stub(self, index: int, block: nn.Module, form: StubForm) -> nn.Module:
        chain = self

        class _Checked(BlockStub):
            def forward(self, *args: object, **kwargs: object) -> BlockOutput:
                chain.check_extra_state(args, kwargs)
                return super().forward(*args, **kwargs)

        def enter(hidden: torch.Tensor) -> torch.Tensor:
            self.shape = self.shape or hidden.shape
            if hidden.shape != self.shape or hidden.ndim != 3 or hidden.shape[:2] != (_ROWS, _TOKENS):
                raise _NotAChainError(f"block {index} was given a tensor of shape {tuple(hidden.shape)}")
            if self.called and index <= self.called[-1]:
                raise UnsupportedModelError(
                    f"{self.model_name} runs one block several times (shared layers), which cannot be cut",
                    hint=f"supported are {SUPPORTED}",
                )
            if not comes_from_last_block(hidden, self.border):
                raise UnsupportedModelError(
                    f"{self.model_name} hands more than hidden states past block {index - 1}",
                    hint=f"supported are {SUPPORTED}",
                )
            self.called.append(index)
            fresh = torch.empty_like(hidden, requires_grad=True).view_as(hidden)
            assert fresh.grad_fn is not None
            self.border = _number(fresh.grad_fn)
            return fresh

        return _Checked(block, form, enter)

    def check_extra_state(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Refuses blocks that read parameters of the embedding beside the hidden states: other stages lack them."""
        hidden = hidden_argument(args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf is not hidden and self.is_from_ids(leaf):
                self.read_ids = True
            if isinstance(leaf, torch.Tensor) and leaf is not hidden and leaf.requires_grad:
                raise UnsupportedModelError(
                    f"the blocks of {self.model_name} share a tensor made of parameters, of shape "
                    f"{tuple(leaf.shape)}, beside the hidden states (as position embeddings), which cannot cross a cut",
                    hint=f"supported are {SUPPORTED}",
                )


def comes_from_last_block(tensor: torch.Tensor, border: int) -> bool:
    """Whether all operations that made `tensor` came after operation `border`: nothing went around the blocks."""
    seen: set[object] = set()
    open_nodes = [tensor.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        if _number(node) < border:
            return False
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
    return True


def _number(node: torch.autograd.graph.Node) -> int:
    return int(node._sequence_nr())  # noqa: SLF001 - torch's documented order of operations has no public reader


def probe(model: "PreTrainedModel", blocks: nn.ModuleList) -> Probe:
    """Runs the empty model once with stubs for blocks; `model` is as before afterwards.

    Raises:
        UnsupportedModelError: Not a chain of distinct blocks that hand over hidden states [B,T,D] alone.
    """
    originals = list(blocks)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        # Also what a family itself never trains (sinusoidal positions) must not reach the blocks of other stages.
        parameter.requires_grad_()
    reason = ""
    forms: tuple[StubForm, ...] = ("tensor", "tuple", "pair")
    model.eval()
    try:
        for form in forms:
            try:
                return _run(model, blocks, originals, form)
            except (_NotAChainError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
                # Any of them may only mean that the loop unpacks a block's result in another way: try the next form.
                reason = reason or f"{type(error).__name__}: {error}"
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a chain of blocks that hand hidden states to one another ({reason})",
        hint=f"supported are {SUPPORTED}",
    )


def _run(model: "PreTrainedModel", blocks: nn.ModuleList, originals: list[nn.Module], form: StubForm) -> Probe:
    chain = _Chain(model, blocks)
    for index, block in enumerate(originals):
        blocks[index] = chain.stub(index, block, form)
    groups = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    slots = dict(model.named_parameters(remove_duplicate=False))
    slot_phases: defaultdict[str, set[int]] = defaultdict(set)
    handles = []
    for owner_name, owner in model.named_modules():
        names = [f"{owner_name}.{leaf}" if owner_name else leaf for leaf, _ in owner.named_parameters(recurse=False)]
        if names:
            handles.append(owner.register_forward_pre_hook(_noting(slot_phases, names, chain)))
    inputs = _inputs(model)
    watch = _Watch(groups, lambda: chain.phase, inputs["input_ids"])
    chain.is_from_ids = watch.is_from_ids
    try:
        with watch:
            logits = model(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    if logits.shape[0] != _ROWS:
        raise _NotAChainError(f"the logits have shape {tuple(logits.shape)} for {_ROWS} rows of {_TOKENS} tokens")
    if not comes_from_last_block(logits, chain.border):
        raise UnsupportedModelError(
            f"{chain.model_name} uses something from before its blocks again after them, which cannot cross a cut",
            hint=f"supported are {SUPPORTED}",
        )
    if chain.called != list(range(len(originals))):
        raise UnsupportedModelError(
            f"{chain.model_name} runs its {len(originals)} blocks in the order {chain.called}, not one after the other",
            hint=f"supported are {SUPPORTED}",
        )
    return Probe(
        form=form,
        phases={name: frozenset(watch.used[groups[id(parameter)]]) for name, parameter in slots.items()},
        slot_phases={name: frozenset(slot_phases[name]) for name in slots},
        blocks_read_ids=chain.read_ids,
    )


def _noting(
    slot_phases: defaultdict[str, set[int]], names: list[str], chain: _Chain
) -> Callable[[nn.Module, object], None]:
    def note(_module: nn.Module, _args: object) -> None:
        for name in names:
            slot_phases[name].add(chain.phase)

    return note


def _inputs(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not read tokens (input_ids)", hint=f"supported are {SUPPORTED}"
        )
    inputs = {"input_ids": torch.zeros(_ROWS, _TOKENS, dtype=torch.long, device="meta")}
    if "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones(_ROWS, _TOKENS, dtype=torch.long, device="meta")
    return inputs
