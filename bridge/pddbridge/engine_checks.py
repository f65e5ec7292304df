"""What every engine refuses before it touches a page: the step contract of :mod:`pddbridge.engine`, checked once, in one place.

Pure functions of the arguments; each raises ``ValueError`` that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import numpy as np

from pddbridge.choice import why_on_host
from pddbridge.engine import MAX_SCORE_LOGPROBS, MAX_SCORED_TOKENS, EngineConfig, KVBlock, Step, StepUnderWay
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.model_spec import ModelSpec

COMPUTE_DTYPES = ("float32", "bfloat16")
# bfloat16 with the weights of linear maps as pddbridge.weight_rounding makes them, where an engine has it.
INT8 = "int8"
# What the engines here keep; the bridge moves more (KV_DTYPES).
ENGINE_KV_DTYPES = ("float32", "bfloat16", "float16")


def check_config(config: EngineConfig, spec: ModelSpec, compute_dtypes: tuple[str, ...] = COMPUTE_DTYPES) -> None:
    """Refuse an engine config that no step could satisfy, or that asks for more context than the model has. ``compute_dtypes``: what the
    engine has.
    """
    if config.compute_dtype not in compute_dtypes:
        raise ValueError(f"compute_dtype: given {config.compute_dtype!r}, allowed {list(compute_dtypes)}")
    if config.kv_dtype not in ENGINE_KV_DTYPES:
        raise ValueError(f"kv_dtype: given {config.kv_dtype!r}, allowed {sorted(ENGINE_KV_DTYPES)}")
    for name in ("page_size", "num_pages", "max_context_tokens", "max_step_tokens", "max_rows", "num_threads", "num_devices"):
        if (given := getattr(config, name)) < 1:
            raise ValueError(f"{name}: given {given}, allowed 1 or more")
    if config.max_context_tokens > spec.max_context_tokens:
        raise ValueError(f"max_context_tokens: given {config.max_context_tokens}, the model allows up to {spec.max_context_tokens}")


def check_step(step: Step, config: EngineConfig, vocab_size: int, after: StepUnderWay | None = None) -> None:
    """Refuse a step that breaks the contract. Looks only at page-table entries that the rows use. ``after``: see
    :meth:`pddbridge.engine.RunsAhead.start_step`.
    """
    _check_i32("token_ids", step.token_ids, 1)
    _check_i32("row_starts", step.row_starts, 1)
    _check_i32("context_lens", step.context_lens, 1)
    _check_i32("page_tables", step.page_tables, 2)
    num_rows, num_tokens = len(step.context_lens), len(step.token_ids)
    if not 1 <= num_rows <= config.max_rows:
        raise ValueError(f"context_lens: given {num_rows} rows, allowed 1 to max_rows={config.max_rows}")
    if not 1 <= num_tokens <= config.max_step_tokens:
        raise ValueError(f"token_ids: given {num_tokens} tokens, allowed 1 to max_step_tokens={config.max_step_tokens}")
    if len(step.row_starts) != num_rows + 1 or len(step.page_tables) != num_rows:
        raise ValueError(
            f"row_starts, page_tables: given lengths {len(step.row_starts)} and {len(step.page_tables)} for {num_rows} rows,"
            f" allowed {num_rows + 1} and {num_rows}"
        )
    new = np.diff(step.row_starts)
    if step.row_starts[0] != 0 or step.row_starts[-1] != num_tokens or new.min() < 1:
        raise ValueError(
            f"row_starts: given {step.row_starts.tolist()}, allowed a rise of 1 or more per row from 0 to the {num_tokens} token_ids"
        )
    check_token_ids("token_ids", step.token_ids, vocab_size)
    lens = step.context_lens.astype(np.int64) + new
    if step.context_lens.min() < 0 or lens.max() > config.max_context_tokens:
        raise ValueError(
            f"context_lens: given {step.context_lens.tolist()} with {new.tolist()} new tokens,"
            f" allowed 0 or more, together up to max_context_tokens={config.max_context_tokens}"
        )
    for row in range(num_rows):
        _check_pages(f"page_tables[{row}]", step.page_tables[row], int(lens[row]), config)
    _check_written_once(step, lens, config)
    _check_samples(step, num_rows, vocab_size, num_unknown=0 if after is None else 1)
    if after is not None:
        _check_follows(step, after, config.sample_on_device)
    _check_scores(step, new, vocab_size)


def check_token_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    """Every id within [0, vocab_size)."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"{name}: given id {wrong}, allowed 0 to {vocab_size - 1}")


def check_page_range(page_table: np.ndarray, tokens: TokenRange, config: EngineConfig) -> None:
    """``page_table`` [P] i32 must reach ``tokens`` with pages of the pool."""
    _check_i32("page_table", page_table, 1)
    first = tokens.start // config.page_size
    _check_pages("page_table", page_table, tokens.stop, config, first_page=first)


def check_page(name: str, page: int, config: EngineConfig) -> None:
    if not 0 <= page < config.num_pages:
        raise ValueError(f"{name}: given page {page}, allowed 0 to {config.num_pages - 1}")


def check_block(block: KVBlock, kv_spec: KVSpec) -> None:
    """A block's plane, ranges, shape and dtype against the model's KV (one group of layers)."""
    planes = {plane.name: plane for group in kv_spec.groups for plane in group.planes}
    if block.plane not in planes:
        raise ValueError(f"block.plane: given {block.plane!r}, allowed {sorted(planes)}")
    plane = planes[block.plane]
    if block.layers.stop > kv_spec.num_layers:
        raise ValueError(f"block.layers: given up to {block.layers.stop}, allowed up to {kv_spec.num_layers}")
    if block.heads.stop > plane.num_heads:
        raise ValueError(f"block.heads: given up to {block.heads.stop}, allowed up to {plane.num_heads}")
    shape = (len(block.layers), len(block.tokens), len(block.heads), plane.head_dim)
    if block.values.shape != shape:
        raise ValueError(f"block.values: given shape {block.values.shape}, its ranges say {shape}")
    if block.values.dtype != kv_spec.np_dtype:
        raise ValueError(f"block.values: given dtype {block.values.dtype}, allowed {kv_spec.dtype}")


def _check_pages(name: str, table: np.ndarray, num_tokens: int, config: EngineConfig, first_page: int = 0) -> None:
    needed = -(-num_tokens // config.page_size)
    if len(table) < needed:
        raise ValueError(f"{name}: given {len(table)} pages of {config.page_size}, {num_tokens} tokens need {needed}")
    used = table[first_page:needed]
    if used.size and (int(used.min()) < 0 or int(used.max()) >= config.num_pages):
        wrong = int(used[(used < 0) | (used >= config.num_pages)][0])
        raise ValueError(f"{name}: given page {wrong}, allowed 0 to {config.num_pages - 1}")


def _check_written_once(step: Step, lens: np.ndarray, config: EngineConfig) -> None:
    """A page that a row writes may be named once: two writers, or a writer beside a reader, would change a neighbour's KV."""
    columns = np.arange(step.page_tables.shape[1])
    used = columns < -(-lens // config.page_size)[:, None]
    written = step.page_tables[used & (columns >= (step.context_lens // config.page_size)[:, None])]
    uses = np.bincount(step.page_tables[used], minlength=config.num_pages)[written]
    if uses.max() > 1:
        raise ValueError(f"page_tables: page {int(written[uses > 1][0])} is written by a row, allowed once, given more than once")


def _check_follows(step: Step, after: StepUnderWay, draws: bool) -> None:
    if not after.feeds_next:
        raise ValueError("after: given a step whose tokens the host chooses, allowed one with feeds_next")
    if len(step.token_ids) != len(step.context_lens) or step.scores:
        raise ValueError(
            f"after: given a step of {len(step.context_lens)} rows, {len(step.token_ids)} tokens and {len(step.scores)} scores,"
            " allowed one token per row and no scores"
        )
    if wrong := [sample.row for sample in step.samples if why_on_host(sample.params, sample.position, draws) is not None]:
        raise ValueError(f"after: row {wrong[0]} samples what needs the host, allowed rows that the device chooses")


def _check_samples(step: Step, num_rows: int, vocab_size: int, num_unknown: int) -> None:
    rows = [sample.row for sample in step.samples]
    if any(not 0 <= row < num_rows for row in rows) or len(set(rows)) != len(rows):
        raise ValueError(f"samples: given rows {rows}, allowed different ones from 0 to {num_rows - 1}")
    for sample in step.samples:
        if sample.position != len(sample.log_ids) + num_unknown:
            known = len(sample.log_ids)
            raise ValueError(f"samples: row {sample.row} samples position {sample.position} with {known} log_ids; must be equal")
        check_token_ids(f"samples: prompt_ids of row {sample.row}", sample.prompt_ids, vocab_size)
        check_token_ids(f"samples: log_ids of row {sample.row}", sample.log_ids, vocab_size)


def _check_scores(step: Step, new: np.ndarray, vocab_size: int) -> None:
    rows = [score.row for score in step.scores]
    if any(not 0 <= row < len(new) for row in rows) or len(set(rows)) != len(rows):
        raise ValueError(f"scores: given rows {rows}, allowed different ones from 0 to {len(new) - 1}")
    for score in step.scores:
        _check_i32(f"scores: next_ids of row {score.row}", score.next_ids, 1)
        if not 1 <= len(score.next_ids) <= new[score.row]:
            raise ValueError(f"scores: row {score.row} has {len(score.next_ids)} next_ids, allowed 1 to its {new[score.row]} new tokens")
        check_token_ids(f"scores: next_ids of row {score.row}", score.next_ids, vocab_size)
        if not 0 <= score.num_logprobs <= MAX_SCORE_LOGPROBS:
            raise ValueError(f"scores: num_logprobs of row {score.row}: given {score.num_logprobs}, allowed 0 to {MAX_SCORE_LOGPROBS}")
    if (num_scored := sum(len(score.next_ids) for score in step.scores)) > MAX_SCORED_TOKENS:
        raise ValueError(f"scores: given {num_scored} tokens, allowed up to {MAX_SCORED_TOKENS} in a step")


def _check_i32(name: str, array: np.ndarray, ndim: int) -> None:
    if array.dtype != np.int32 or array.ndim != ndim:
        raise ValueError(f"{name}: given {array.dtype} with {array.ndim} axes, allowed int32 with {ndim}")
