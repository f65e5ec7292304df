"""What a worker is for. A role is only what the coordinator asks of it: any worker process can do any of them."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "relay", "main"]
