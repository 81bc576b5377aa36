"""Weights in and out: Hugging Face folders, timm's names, and Penstock's own; safetensors only, never
unpickled.
"""

from __future__ import annotations

from penstock.config.theirs.backbones import config_from_hf as config_from_hf
from penstock.config.theirs.backbones import hf_config as hf_config
from penstock.config.theirs.text import read_text_config as read_text_config
from penstock.config.theirs.text import write_text_config as write_text_config
from penstock.models.convert.files import read_state_dict as read_state_dict
from penstock.models.convert.load import Loaded as Loaded
from penstock.models.convert.load import fitted as fitted
from penstock.models.convert.load import load_weights as load_weights
from penstock.models.convert.load import require_as_large as require_as_large
from penstock.models.convert.names import text_from_hf as text_from_hf
from penstock.models.convert.names import text_to_hf as text_to_hf
from penstock.models.convert.parts import branch_of as branch_of
from penstock.models.convert.parts import load_part as load_part
from penstock.models.convert.pretrained import from_pretrained as from_pretrained
from penstock.models.convert.pretrained import model_in as model_in
from penstock.models.convert.pretrained import require_theirs as require_theirs
from penstock.models.convert.pretrained import save_pretrained as save_pretrained
from penstock.models.convert.vit import from_hf as from_hf
from penstock.models.convert.vit import from_timm as from_timm
from penstock.models.convert.vit import resize_positions as resize_positions
from penstock.models.convert.vit import to_hf as to_hf
from penstock.models.convert.vit import to_timm as to_timm
