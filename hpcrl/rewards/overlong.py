"""DAPO's soft penalty for responses that come near the limit of their length (arXiv 2503.14476, equation 13)."""

from __future__ import annotations


def overlong_reward(response_length: int, max_resp_len: int, buffer_len: int, penalty_factor: float) -> float:
    """What is added to the score, <= 0; lengths in tokens, tool tokens and the end-of-sequence token included.

    0 up to max_resp_len - buffer_len tokens, then linear down to -penalty_factor at max_resp_len. As in verl, and
    unlike the paper, it goes on falling beyond max_resp_len.
    """
    exceeded = response_length - (max_resp_len - buffer_len)
    return min(-exceeded / buffer_len * penalty_factor, 0.0)
