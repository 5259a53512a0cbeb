"""What the device keeps for each running sequence: one row of integers, one of floats. No tensors here."""

from __future__ import annotations

from enum import IntEnum

BLOCK_SIZE = 8  # tokens in one block of the cache
STOP_SLOTS = 16  # stop tokens a row can hold
FORBIDDEN_SLOTS = 64  # forbidden tokens a row can hold


class Column(IntEnum):
    """Of the integers; STOP_SLOTS stop tokens follow (-1 where unused)."""

    TOKEN = 0  # to be fed next
    POSITION = 1  # of that token in its sequence
    STORED = 2  # tokens of the sequence that the cache holds already; these are not written again
    COUNT = 3  # tokens drawn
    LIMIT = 4  # tokens that may be drawn
    MIN_NEW = 5  # stop tokens are forbidden while fewer than this were drawn
    KEY = 6  # of the noise
    TOP_K = 7  # 0: off
    STATE = 8
    FORBIDDEN = 9  # entries of the row in the table of forbidden tokens
    STOPS = 10  # the first of the stop tokens


class RowState(IntEnum):
    """Of those that end a sequence the larger wins where several hold at once."""

    RUNNING = 0
    LENGTH = 1
    STOP = 2
    BROKEN = 3  # the logits were not numbers
    IDLE = 4  # nobody's row


WIDTH = Column.STOPS + STOP_SLOTS
