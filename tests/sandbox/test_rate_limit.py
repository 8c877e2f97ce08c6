"""When requests may start: hand-computed times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.sandbox.process_pool import RateLimit, TokenBucket


def test_a_minutes_requests_are_spread_over_it() -> None:
    bucket = TokenBucket(rate=2.0)  # full at first: two at once, then one each half second
    assert [bucket.reserve(1, 10.0) for _ in range(5)] == [10.0, 10.0, 10.5, 11.0, 11.5]
    # At 13 s what was owed is paid (-3 + 6) and no more than a second's worth has come together.
    assert [bucket.reserve(1, 13.0) for _ in range(3)] == [13.0, 13.0, 13.5]


def test_what_is_more_than_a_seconds_worth_waits_for_the_rest_of_it() -> None:
    bucket = TokenBucket(rate=1000.0)  # 1000 are there; 2000 take another second, the next ones two each
    assert [bucket.reserve(2000, 0.0) for _ in range(3)] == [1.0, 3.0, 5.0]


def test_a_request_waits_for_its_turn_and_then_for_its_tokens() -> None:
    limit = RateLimit(1, max_rpm=60, max_tpm=60_000, tokens_per_request=500)
    assert [limit.reserve(0.0) for _ in range(3)] == [0.0, 1.0, 2.0]  # requests bind
    limit = RateLimit(1, max_rpm=600, max_tpm=60_000, tokens_per_request=1000)
    assert [limit.reserve(0.0) for _ in range(3)] == [0.0, 1.0, 2.0]  # tokens bind
    assert RateLimit(1, None, None, 2000).reserve(7.0) == 7.0


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 3)), min_size=1, max_size=30),
)
def test_no_window_gets_more_than_its_rate_and_a_second(rate: float, requests: list[tuple[float, float]]) -> None:
    bucket, now, starts = TokenBucket(rate), 0.0, []
    for amount, pause in requests:
        now += pause
        starts.append((bucket.reserve(amount, now), amount))
    times = [start for start, _ in starts]
    assert times == sorted(times)
    for first, (begin, _) in enumerate(starts):
        total = 0.0
        for end, amount in starts[first:]:
            # What starts at `end` has been paid for by then; of what started at `begin`, up to a second's worth before.
            total += amount
            assert total - starts[first][1] <= rate * (end - begin) + rate + 1e-6 * (1 + total)
