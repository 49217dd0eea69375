"""A `config.json` becomes a geometry: finds the file, the text model in it, its name and its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from hybridkv.errors import UnsupportedError
from hybridkv.geometry.checks import one_of, refuse
from hybridkv.geometry.config_fields import Fields
from hybridkv.geometry.families import FAMILIES
from hybridkv.geometry.model import ModelGeometry
from hybridkv.geometry.specs import chunk_tokens

if TYPE_CHECKING:
    from hybridkv.geometry.specs import RecurrentSpec

SSM_DTYPES: Mapping[str, str | None] = {"float32": "fp32", "float16": "fp16", "bfloat16": None, "auto": None}


def _load(source: str | PathLike[str]) -> tuple[Mapping[str, object], str]:
    """Read the file and the name that its directory gives the model."""
    expected = "a config.json, a directory that holds one, or a mapping"
    if not isinstance(source, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("path_or_mapping", expected, source)
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        refuse("path_or_mapping", expected, str(source), error.strerror or "")
    except ValueError as error:
        refuse("path_or_mapping", expected, str(source), f"it is not JSON: {error}")
    if not isinstance(found, dict):
        refuse("path_or_mapping", "a JSON object", type(found).__name__)
    return cast("dict[str, object]", found), file.resolve().parent.name


def _live_dtype(fields: Fields, recurrent: RecurrentSpec | None) -> str | None:
    name, declared = fields.find("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if declared is None or recurrent is None:
        return None
    return SSM_DTYPES[one_of(name, declared, SSM_DTYPES)]


def from_config(
    source: str | PathLike[str] | Mapping[str, object], overrides: Mapping[str, Any]
) -> ModelGeometry:
    """Read a configuration; see `ModelGeometry.from_hf`."""
    values, folder = (source, "") if isinstance(source, Mapping) else _load(source)
    fields = Fields(values)
    outer_type = fields.find("model_type")[1]
    path = values.get("_name_or_path")
    label = PurePath(path).name if isinstance(path, str) else ""
    if fields.find("text_config")[1] is not None:
        fields = fields.inner("text_config")
    name, model_type = fields.find("model_type")
    if model_type is None:
        model_type = outer_type
    if not isinstance(model_type, str):
        refuse(name, "the name of a model family", model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(f"{name} must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    parts = family(fields)
    return ModelGeometry(
        name=label or folder or model_type,
        layers=parts.layers,
        attention=parts.attention,
        recurrent=parts.recurrent,
        loop=parts.loop,
        live_state_dtype=_live_dtype(fields, parts.recurrent),
        chunk_tokens=chunk_tokens(parts.recurrent),
    ).replace(**overrides)
