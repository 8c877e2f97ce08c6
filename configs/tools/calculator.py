"""The tool of tool_countdown_cpu.yaml."""

from hpcrl.rewards.scorers.countdown import evaluate
from hpcrl.rollout.environments.tools import tool


@tool
def calculate(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: whole numbers with + - * / and parentheses, such as (8-5)*2
    """
    value = evaluate(expression.replace(" ", "")).value
    if value is None:
        raise ZeroDivisionError("division by zero")
    return str(value)
