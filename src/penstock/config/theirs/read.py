"""Reading models from folders and config.json files, of transformers and of Penstock."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from penstock.boundary.files import read_bytes, shown
from penstock.boundary.hub import hub_folder
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.formats import FORMATS
from penstock.config.load import from_dict
from penstock.config.model import FAMILIES, ModelConfig
from penstock.config.theirs.backbones import backbone_of, config_from_hf
from penstock.config.theirs.text import read_text_config
from penstock.config.theirs.timm import timm_config
from penstock.errors import CheckpointError, ConfigError

OWN = "penstock_"
"""Prefix of Penstock's own model types, before the family."""
METHOD = "compressed-tensors"
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
GROUPS = {
    "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": FORMATS["int4"].group,
    "dynamic": False,
}  # fmt: skip
_CONFIG = Bounds(bytes=1 << 24, values=1 << 20)
"""Names of classes make up nearly all of a large one."""
_REMEDY = "Fetch or write it again."
_CONFIG_FILE = "config.json"


class NamedModel(NamedTuple):
    """A model that a folder or file describes."""

    config: ModelConfig
    name: str
    """The name of its run, of its folder, or on the hub."""
    folder: str
    """The folder, or the name on the hub."""


def named_model(source: str) -> NamedModel:
    """The model that a folder, a config.json, a name on the Hugging Face hub, or `timm:` and timm's name describes.
    From the hub only config.json is downloaded.

    Raises ConfigError for a folder without one and for a model of another family, and as `hub_folder`.
    """
    if source.startswith("timm:"):
        name = source.removeprefix("timm:")
        return NamedModel(timm_config(name), name, source)
    path = Path(source)
    if path.is_dir():
        inside = [path, path / "export"]
        file = next((one / _CONFIG_FILE for one in inside if (one / _CONFIG_FILE).is_file()), None)
    elif path.is_file():
        file = path
    else:
        folder = hub_folder(source, (_CONFIG_FILE,), enough=lambda one: (one / _CONFIG_FILE).is_file())
        file = None if folder is None else folder / _CONFIG_FILE
    if file is None:
        raise ConfigError(
            f"{shown(source)} has no {_CONFIG_FILE}; give a folder that save_pretrained wrote, a run's folder whose "
            "export is written, or the file itself."
        )
    place = path.resolve() if path.exists() else Path(source.partition("@")[0])
    place = place.parent if path.is_file() else place
    name = place.parent.name if place.name == "export" else place.name
    return NamedModel(
        model_of(read_json(file), shown(file)), name, str(path.parent if path.is_file() else source)
    )


def model_of(values: dict[str, Any], origin: str = _CONFIG_FILE) -> ModelConfig:
    """`config_of`, for a file that must name its model_type."""
    if "model_type" not in values and "architecture" not in values:
        raise ConfigError(f"{origin} has no model_type: it is no config.json of transformers or Penstock.")
    return config_of(values, origin)


def config_of(values: dict[str, Any], origin: str = _CONFIG_FILE) -> ModelConfig:
    """The model that the content of a config.json describes; `origin` is the file. Raises ConfigError."""
    if "model_type" not in values and "architecture" in values:
        raise ConfigError(
            f"{origin} is of timm's {shown(str(values['architecture']))}, which does not give its shape; "
            "create the model from a preset and call load_weights(model, folder)."
        )
    if (quantisation := values.pop("quantization_config", None)) is not None:
        require_readable(quantisation)
    kind = values.get("model_type", "vit")
    if isinstance(kind, str) and kind.removeprefix(OWN) in FAMILIES and kind.startswith(OWN):
        origin = f"{origin}, which another version of Penstock may have written"
        own = values.get("penstock")
        return from_dict(
            FAMILIES[kind.removeprefix(OWN)], own if isinstance(own, dict) else {}, origin=origin
        )
    foreign = isinstance(kind, str) and backbone_of(kind) is None
    return read_text_config(values) if foreign else config_from_hf(values)


def require_readable(quantisation: Any) -> None:
    """Refuse a `quantization_config` whose weights `models.rounded` does not read. Raises ConfigError."""
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if method == "mxfp4" or (method == "fp8" and quantisation.get("weight_block_size") == [128, 128]):
        return
    groups = quantisation.get("config_groups") if method == METHOD else None
    for group in groups.values() if isinstance(groups, dict) else [None]:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not any(
            all(weights.get(name) == value for name, value in known.items() if name != "group_size")
            for known in (CHANNELS, GROUPS)
        ):
            raise ConfigError(
                "config.json has a quantization_config of another kind than Penstock reads: int8 with a scale for each "
                f"output, or int4 with zero points in groups, of {METHOD}; mxfp4; or fp8 in blocks of 128 × 128. Use "
                "the model before it was quantised, or let transformers dequantise it first."
            )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    raw = read_bytes(path, "The file", limit=_CONFIG.bytes, error=CheckpointError, remedy=_REMEDY)
    where = f"{path} cannot be read as JSON: it"
    return parse_json(raw, where, error=CheckpointError, bounds=_CONFIG, remedy=_REMEDY)
