"""The configuration of models: their family and sizes, but not how they run.

`ModelConfig` is a union of one dataclass per family, distinguished by `family`. All families use the sizes of
a `Stack` of blocks. Code that needs only these calls `stacks(config)` and does not depend on the family.
"""

from __future__ import annotations

from penstock.config.model.diffusion import DiffusionConfig as DiffusionConfig
from penstock.config.model.every import FAMILIES as FAMILIES
from penstock.config.model.every import ModelConfig as ModelConfig
from penstock.config.model.every import TextConfig as TextConfig
from penstock.config.model.every import changes as changes
from penstock.config.model.every import enrol as enrol
from penstock.config.model.every import option_words as option_words
from penstock.config.model.every import stacks as stacks
from penstock.config.model.every import title as title
from penstock.config.model.every import vocabulary_of as vocabulary_of
from penstock.config.model.family import Branch as Branch
from penstock.config.model.family import Classifier as Classifier
from penstock.config.model.family import EncoderHead as EncoderHead
from penstock.config.model.family import ModelFamily as ModelFamily
from penstock.config.model.family import Pixels as Pixels
from penstock.config.model.family import Pooler as Pooler
from penstock.config.model.family import PoolNorm as PoolNorm
from penstock.config.model.family import Tokens as Tokens
from penstock.config.model.family import Words as Words
from penstock.config.model.family import with_stacks as with_stacks
from penstock.config.model.multimodal import MultimodalConfig as MultimodalConfig
from penstock.config.model.presets import PRESETS as PRESETS
from penstock.config.model.presets import preset as preset
from penstock.config.model.text import DecoderConfig as DecoderConfig
from penstock.config.model.text import EncoderConfig as EncoderConfig
from penstock.config.model.text import Seq2SeqConfig as Seq2SeqConfig
from penstock.config.model.universal import UniversalConfig as UniversalConfig
from penstock.config.model.vit import ViTConfig as ViTConfig
from penstock.config.stack import Stack as Stack
