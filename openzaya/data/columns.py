"""Arithmetic on paper: one digit at a time from the right, with what is carried or borrowed.

Each step is `calculation=result:written`, where `written` is what stands below the line so far. All
tasks that calculate write their steps this way, so that one skill, learned once, serves them all.
"""

from __future__ import annotations


def add(a: int, b: int) -> list[str]:
    """Steps of a + b, each `x+y+carry=total:written`."""
    steps, carry, written = [], 0, ""
    width = max(len(str(a)), len(str(b)))
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        # At the leftmost place the whole sum is written, which ends the number.
        written = f"{total % 10 if place < width - 1 else total}{written}"
        steps.append(f"{x}+{y}+{carry}={total}:{written}")
        carry = total // 10
    return steps


def subtract(a: int, b: int) -> list[str]:
    """Steps of a - b for a >= b, each `x-y-borrow=digit:written`, x with the ten it was lent."""
    steps, borrow, written = [], 0, ""
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        lent = 10 if x - y - borrow < 0 else 0
        digit = x + lent - y - borrow
        written = f"{digit}{written}"
        steps.append(f"{x + lent}-{y}-{borrow}={digit}:{written}")
        borrow = lent // 10
    return steps


def multiply(a: int, digit: int) -> list[str]:
    """Steps of a * digit for a single digit, each `x*digit+carry=total:written`."""
    steps, carry, written = [], 0, ""
    width = len(str(a))
    for place in range(width):
        x = a // 10**place % 10
        total = x * digit + carry
        written = f"{total % 10 if place < width - 1 else total}{written}"
        steps.append(f"{x}*{digit}+{carry}={total}:{written}")
        carry = total // 10
    return steps


def line(value: int, sign: str, operand: int) -> tuple[int, str]:
    """One operation of several, worked on one line.

    Returns:
        The result, and `value sign operand: step step ...=result`.
    """
    work = {"+": add, "-": subtract, "*": multiply}[sign]
    result = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
    return result, f"{value}{sign}{operand}: {' '.join(work(value, operand))} ={result}"
