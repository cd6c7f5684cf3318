"""Batches of unequal lengths, without computing what is padding: documents packed into rows, padded batches trimmed."""

from ops_nn.data.packing import PackedDocuments, pack_documents, split_rows
from ops_nn.data.trimming import trim_to_longest

__all__ = ["PackedDocuments", "pack_documents", "split_rows", "trim_to_longest"]
