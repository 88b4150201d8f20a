"""Laws of `RestartPolicy`."""

from headrace_scheduling import RestartPolicy


def test_restarts_are_limited_within_a_window():
    """Law: at most `max_restarts` fall into any window, and time gives them back."""
    now = [0.0]
    policy = RestartPolicy(max_restarts=2, window_s=60.0, clock=lambda: now[0])
    assert [policy.allow(), policy.allow(), policy.allow()] == [True, True, False]
    now[0] = 59.9
    assert not policy.allow()
    now[0] = 60.0
    assert policy.allow()
    assert policy.num_restarts == 3
