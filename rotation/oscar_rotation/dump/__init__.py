"""Dumps of post-RoPE queries, keys and values: layout, writer (for servers) and reader (for fits)."""

from oscar_rotation.dump.manifest import MANIFEST_NAME, DumpManifest
from oscar_rotation.dump.reader import DumpChunk, DumpReader
from oscar_rotation.dump.writer import DumpWriter
from oscar_rotation.errors import DumpError

__all__ = ["MANIFEST_NAME", "DumpChunk", "DumpError", "DumpManifest", "DumpReader", "DumpWriter"]
