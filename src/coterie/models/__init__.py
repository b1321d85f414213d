"""Models: opened, described, cut into stages and filled, for any Hugging Face transformer that is a chain of blocks."""

from coterie.models.anatomy import Anatomy, TiedPair, describe
from coterie.models.frozen_weights import PackedWeights
from coterie.models.keys import RandomKey, seed_for
from coterie.models.skeleton import config_of, find_blocks
from coterie.models.source import ModelSource, open_model
from coterie.models.spec import make_forward_spec, make_model_spec
from coterie.models.stage import StageModule, build_stage
from coterie.models.weights import FolderWeights, MappingWeights, WeightStore
from coterie.models.whole import load_whole_model, named_by_unit, seed_by_key

__all__ = [
    "Anatomy",
    "FolderWeights",
    "MappingWeights",
    "ModelSource",
    "PackedWeights",
    "RandomKey",
    "StageModule",
    "TiedPair",
    "WeightStore",
    "build_stage",
    "config_of",
    "describe",
    "find_blocks",
    "load_whole_model",
    "make_forward_spec",
    "make_model_spec",
    "named_by_unit",
    "open_model",
    "seed_by_key",
    "seed_for",
]
