"""``manifest.json`` at the root of a dump: what was dumped, from which model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.errors import DumpError, DumpVersionError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


class DumpManifest(BaseModel):
    """Facts about a dump. Optional on reading: dumps in the public layout have none.

    Attributes:
        format_version: version of the layout.
        model_id, model_hash: the model and a hash of its configuration; recorded in the fitted files.
        model_overrides: of its configuration, the server's ``--json-model-override-args``.
        weights_digest: of its attention weights, see :class:`oscar_rotation.files.identity.ModelIdentity`.
        weights: where its weights are, a hub id or an absolute folder; stays in the dump.
        num_layers: attention layers that are dumped; in the dump they are 0 .. num_layers - 1.
        layer_ids: which layers of the model they are, where they are not all; ascending.
        q_heads, kv_heads, head_dim: of the whole model, not of one tensor-parallel rank.
        value_head_dim: channels of a head of the values; None where keys have as many.
        dtype: dtype of the activations, for instance "bfloat16".
        tokens: tokens per layer, all chunks together.
        tp_size: tensor-parallel ranks that wrote shards.
        sm_scale: factor on the attention logits; None for 1/sqrt(head_dim).
        sink_logits: layers of the dump whose heads have sink logits, ascending; none while the dump is being written,
            nor in a dump of covariances, which has counted them.
        output_readers: whether every layer has what reads its attention outputs.
        complete: False while the dump is being written. A dump left so was interrupted.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    format_version: int = MANIFEST_VERSION
    model_id: str = ""
    model_hash: str = ""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    weights_digest: str = ""
    weights: str = ""
    num_layers: int = Field(gt=0)
    layer_ids: tuple[NonNegativeInt, ...] | None = None
    q_heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    value_head_dim: int | None = Field(default=None, gt=0)
    dtype: str = "bfloat16"
    tokens: int = Field(default=0, ge=0)
    tp_size: int = Field(default=1, gt=0)
    sm_scale: float | None = Field(default=None, gt=0)
    sink_logits: tuple[NonNegativeInt, ...] = ()
    output_readers: bool = False
    complete: bool = True

    @model_validator(mode="after")
    def _one_id_a_layer(self) -> DumpManifest:
        ids = self.layer_ids
        if ids is not None and (len(ids) != self.num_layers or sorted(set(ids)) != list(ids)):
            raise ValueError(f"layer_ids are not {self.num_layers} ascending layers")
        return self

    @property
    def value_channels(self) -> int:
        """Channels of a head of the values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def write(self, root: str | Path) -> None:
        """Write ``<root>/manifest.json`` atomically.

        Raises:
            OSError: if the file cannot be written.
        """
        write_text_atomically(Path(root) / MANIFEST_NAME, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, root: str | Path) -> DumpManifest | None:
        """Read ``<root>/manifest.json``; None where there is none.

        Raises:
            DumpVersionError: it is of a version that this release does not read.
            DumpError: it is not valid.
        """
        path = Path(root) / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "content"
            raise DumpError(f"{path}: not a dump manifest: {place}: {first['msg']}") from error
        except OSError as error:
            raise DumpError(f"{path}: cannot be read ({error.strerror})") from error
        if manifest.format_version != MANIFEST_VERSION:
            raise DumpVersionError(
                f"{path}: format_version is {manifest.format_version}, this release reads {MANIFEST_VERSION}; "
                "update sglang-oscar"
            )
        return manifest
