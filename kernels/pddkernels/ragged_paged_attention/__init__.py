"""Attention of a ragged batch over paged KV: decode, extend and prefill-chunk rows in one call."""
