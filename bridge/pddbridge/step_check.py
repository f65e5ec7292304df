"""What a :class:`Step` must fulfil before an engine may index anything with it. One check for every engine, on the host, before any work."""

from __future__ import annotations

from typing import Final

import numpy as np

from pddbridge.engine import EngineConfig, Step

_FIELDS: Final = (("token_ids", 1), ("row_starts", 1), ("context_lens", 1), ("page_tables", 2))


def check_step(step: Step, config: EngineConfig, vocab_size: int) -> None:
    """Raises ValueError naming the field, what was given and what is allowed. A step that passes touches nothing outside its own pages.

    Rows have at least one new token each. Pages that a row writes belong to that row alone, here and in the pages other rows read.
    """
    for name, ndim in _FIELDS:
        array = getattr(step, name)
        if array.dtype != np.int32 or array.ndim != ndim:
            raise ValueError(f"Step.{name}: given {array.dtype} with {array.ndim} axes, allowed int32 with {ndim}")
    num_rows = len(step.context_lens)
    num_tokens = len(step.token_ids)
    if not 1 <= num_rows <= config.max_rows:
        raise ValueError(f"Step.context_lens: given {num_rows} rows, allowed 1..{config.max_rows}")
    if not 1 <= num_tokens <= config.max_step_tokens:
        raise ValueError(f"Step.token_ids: given {num_tokens} tokens, allowed 1..{config.max_step_tokens}")
    if len(step.row_starts) != num_rows + 1 or step.row_starts[0] != 0 or step.row_starts[-1] != num_tokens:
        raise ValueError(f"Step.row_starts: given {step.row_starts.tolist()}, allowed {num_rows + 1} entries from 0 to {num_tokens}")
    news = np.diff(step.row_starts.astype(np.int64))
    if news.min() < 1:
        raise ValueError(f"Step.row_starts: given {step.row_starts.tolist()}, every row needs a new token")
    if step.token_ids.min() < 0 or step.token_ids.max() >= vocab_size:
        bad = step.token_ids[(step.token_ids < 0) | (step.token_ids >= vocab_size)]
        raise ValueError(f"Step.token_ids: given {int(bad[0])}, allowed 0..{vocab_size - 1}")
    if step.context_lens.min() < 0:
        raise ValueError(f"Step.context_lens: given {int(step.context_lens.min())}, allowed 0 and more")
    kv_lens = step.context_lens.astype(np.int64) + news
    if kv_lens.max() > config.max_context_tokens:
        raise ValueError(f"Step.context_lens: a row reaches {int(kv_lens.max())} tokens, allowed {config.max_context_tokens}")
    _check_pages(step, kv_lens, config)
    _check_samples(step, num_rows, vocab_size)


def _check_pages(step: Step, kv_lens: np.ndarray, config: EngineConfig) -> None:
    tables, size = step.page_tables, config.page_size
    num_used = -(-kv_lens // size)
    if len(tables) != len(kv_lens) or tables.shape[1] < num_used.max():
        raise ValueError(
            f"Step.page_tables: given {list(tables.shape)}, allowed {len(kv_lens)} rows of {int(num_used.max())} pages or more"
        )
    columns = np.arange(tables.shape[1])
    used = columns < num_used[:, None]
    pages = tables[used]
    if pages.min() < 0 or pages.max() >= config.num_pages:
        bad = pages[(pages < 0) | (pages >= config.num_pages)]
        raise ValueError(f"Step.page_tables: given page {int(bad[0])}, allowed 0..{config.num_pages - 1}")
    written = tables[used & (columns >= (step.context_lens.astype(np.int64) // size)[:, None])]
    uses = np.bincount(pages, minlength=config.num_pages)[written]
    if uses.max() > 1:
        raise ValueError(f"Step.page_tables: page {int(written[uses > 1][0])} is written, so it may be named once, but it is named twice")


def _check_samples(step: Step, num_rows: int, vocab_size: int) -> None:
    for sample in step.samples:
        if not 0 <= sample.row < num_rows:
            raise ValueError(f"SampleRow.row: given {sample.row}, allowed 0..{num_rows - 1}")
        if sample.position < 0 or len(sample.log_ids) != sample.position:
            raise ValueError(f"SampleRow.position: given {sample.position} with {len(sample.log_ids)} log_ids, they must be equal")
        for name, ids in (("prompt_ids", sample.prompt_ids), ("log_ids", sample.log_ids)):
            if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
                raise ValueError(f"SampleRow.{name}: given ids from {int(ids.min())} to {int(ids.max())}, allowed 0..{vocab_size - 1}")
        outside = [i for i in (*(i for i, _ in sample.params.logit_bias), *sample.params.stop_set) if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(f"SampleRow.params: logit_bias or stop ids name {outside[0]}, allowed 0..{vocab_size - 1}")


def check_engine_config(config: EngineConfig, max_context_tokens: int) -> None:
    """Sizes that no engine can serve. ``max_context_tokens`` is the model's. Raises ValueError naming the field."""
    for name in ("page_size", "num_pages", "max_step_tokens", "max_rows", "num_threads"):
        if getattr(config, name) < 1:
            raise ValueError(f"EngineConfig.{name}: given {getattr(config, name)}, allowed 1 and more")
    if not 1 <= config.max_context_tokens <= max_context_tokens:
        raise ValueError(
            f"EngineConfig.max_context_tokens: given {config.max_context_tokens}, allowed 1..{max_context_tokens} for this model"
        )
    if config.compute_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"EngineConfig.compute_dtype: given {config.compute_dtype!r}, allowed ['bfloat16', 'float32']")
    if config.num_pages * config.page_size < config.max_context_tokens:
        raise ValueError(
            f"EngineConfig.num_pages: {config.num_pages} pages of {config.page_size} cannot hold one request of"
            f" max_context_tokens={config.max_context_tokens}"
        )
