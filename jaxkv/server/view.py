"""What the live page shows: the pool, block by block, and the requests at work. No text of anybody's is in it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

from jaxkv.engine import Engine
from jaxkv.row import Row

STATES = ("free", "private", "shared", "cached")


def pool_view(engine: Engine, names: dict[int, str]) -> dict[str, Any]:
    """Return pool and rows as JSON can hold them.

    Args:
      engine: between two steps.
      names: how to call requests, by their ids.

    Returns:
      ``blocks`` as runs ``[state, count]`` in the order of the pool, their counts by state, and the rows at work, with
      the blocks that each holds now and those that compaction has given back.
    """
    states = engine.blocks.states()
    counted = Counter(states)
    return {
        "block_size": engine.cache.block_size,
        "blocks": [[state, len(list(run))] for state, run in itertools.groupby(states)],
        "counts": {state: counted[state] for state in STATES},
        "rows": engine.cache.rows,
        "requests": [_row(row, names) for row in engine.rows],
        "waiting": len(engine.scheduler.queue),
        "kept": len(engine.memory.kept),
    }


def _row(row: Row, names: dict[int, str]) -> dict[str, Any]:
    return {
        "id": names.get(row.request_id, str(row.request_id)),
        "choice": row.choice,
        "state": "decoding" if row.decoding else "prefilling",
        "prompt_tokens": len(row.request.prompt),
        "generated_tokens": row.generated,
        "position": row.position,
        "blocks_held": len(row.blocks),
        "blocks_returned": row.blocks_returned,
        "tokens_evicted": row.tokens_evicted,
        "compactions": row.compactions,
        "budget": None if row.budget is None else row.budget.b_row,
        "seconds": round(time.perf_counter() - row.arrived, 1),
    }
