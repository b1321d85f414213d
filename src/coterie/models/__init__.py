"""Models: opened, described, cut into stages and filled, for any Hugging Face transformer that is a chain of blocks."""

from coterie.models.anatomy import Anatomy, TiedPair, describe
from coterie.models.keys import RandomKey, seed_for
from coterie.models.source import ModelSource, open_model
from coterie.models.spec import make_model_spec
from coterie.models.stage import StageModule, build_stage
from coterie.models.weights import FolderWeights, MappingWeights, WeightStore

__all__ = [
    "Anatomy",
    "FolderWeights",
    "MappingWeights",
    "ModelSource",
    "RandomKey",
    "StageModule",
    "TiedPair",
    "WeightStore",
    "build_stage",
    "describe",
    "make_model_spec",
    "open_model",
    "seed_for",
]
