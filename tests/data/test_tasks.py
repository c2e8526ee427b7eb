from __future__ import annotations

import re

import pytest

from openzaya.data import tasks
from openzaya.data.tasks import KINDS, VERIFIABLE, as_chat, as_plain, make
from openzaya.errors import UserError


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


@pytest.mark.parametrize("kind", VERIFIABLE)
def test_heldout_problems_never_appear_in_training(kind: str) -> None:
    trained = {make(kind, seed, i).problem for seed in (0, 1) for i in range(1500)}
    held = {make(kind, seed, i, heldout=True).problem for seed in (0, 9) for i in range(150)}
    assert not trained & held
    assert all(tasks.problem_is_heldout(problem) for problem in held)


def test_the_split_is_by_content_and_a_tenth() -> None:
    draws = [f"add {i} {j}" for i in range(60) for j in range(60)]
    assert 0.08 < sum(map(tasks.problem_is_heldout, draws)) / len(draws) < 0.12
    # Whichever way round a sum is asked, it is the same problem.
    for i in range(200):
        task = make("add", 3, i)
        a, b = numbers(task.question)
        assert task.problem == f"add {min(a, b)} {max(a, b)}"


@pytest.mark.parametrize("kind", KINDS)
def test_make_is_pure_and_varied(kind: str) -> None:
    one = [make(kind, 5, i) for i in range(40)]
    assert one == [make(kind, 5, i) for i in reversed(range(40))][::-1]
    assert len({task.question for task in one}) > 15
    assert one != [make(kind, 6, i) for i in range(40)]


@pytest.mark.parametrize("kind", ["add", "sub"])
def test_sums_work_from_right_to_left(kind: str) -> None:
    for i in range(300):
        task = make(kind, 0, i)
        a, b = numbers(task.question)
        if task.question.startswith("Subtract"):
            a, b = b, a
        assert int(task.answer) == (a + b if kind == "add" else a - b)
        lines = task.steps.split("\n")
        assert len(lines) == max(len(str(a)), len(str(b)))
        for line in lines:
            sum_, result = line.split(":")[0].split("=")
            assert eval(sum_) == int(result)  # the text is ours: digits and signs
        assert int(lines[-1].split(":")[1]) == int(task.answer)


def test_chain_writes_every_value() -> None:
    for i in range(200):
        task = make("chain", 0, i)
        value = numbers(task.problem)[0]
        signs = re.findall(r"([-+*])(\d+)", task.problem)
        assert len(signs) == len(task.steps.split("\n"))
        for (sign, operand), line in zip(signs, task.steps.split("\n"), strict=True):
            left, rest = line.split(": ")
            steps, *results = re.split(" =|>", rest)
            assert left in (f"{value}{sign}{operand}", f"{value + 100}{sign}{operand}")
            assert int(steps.rsplit(":", 1)[1]) == int(results[0]) == eval(left) >= 0
            value = int(results[-1])
            assert value == eval(left) % 100
        assert task.answer == str(value)


def test_compare_count_sort() -> None:
    for i in range(200):
        task = make("compare", 0, i)
        best = max if "largest" in task.question else min
        assert int(task.answer) == best(numbers(task.question))
        assert int(task.steps.rsplit(":", 1)[1]) == int(task.answer)
        task = make("count", 0, i)
        target, items = task.problem.split()[1:]
        assert int(task.answer) == items.count(target)
        lines = task.steps.split("\n")
        assert len(lines) == len(items)
        assert all(line.split()[1].split(":")[0] == target for line in lines)
        task = make("sort", 0, i)
        assert numbers(task.answer) == sorted(numbers(task.question))
        assert [int(line.split(":")[1]) for line in task.steps.split("\n")] == numbers(task.answer)


def test_story_ends_with_the_answer() -> None:
    for i in range(300):
        task = make("story", 0, i)
        assert not re.search(r"[{}]", task.question)
        for line in task.steps.split("\n"):
            left, right = line.split(": ")[0], line.rsplit(" =", 1)[1]
            assert eval(left) == int(right) >= 0
        assert task.steps.endswith(f"={task.answer}")


def test_texts() -> None:
    task = make("sort", 0, 0)
    user, reply = as_chat(task)
    assert user == {"role": "user", "content": task.question}
    assert reply["content"] == (
        f"<think>\n{task.steps}\n</think>\nThe answer is \\boxed{{{task.answer}}}."
    )
    assert as_plain(task) == (
        f"{task.question}\n{task.steps}\nThe answer is \\boxed{{{task.answer}}}."
    )
    talk = make("talk", 0, 0)
    assert as_chat(talk)[1]["content"] == f"<think>\n</think>\n{talk.answer}"
    assert "<" not in as_plain(talk)


def test_talk_says_what_it_is_and_is_not_evaluated() -> None:
    replies = {(t.question, t.answer) for t in (make("talk", 0, i) for i in range(600))}
    assert any(q == "What are you?" and "OpenZAYA" in a for q, a in replies)
    assert len({question for question, _ in replies}) > 40
    with pytest.raises(ValueError, match="talk"):
        make("talk", 0, 0, heldout=True)


def test_select_and_choose() -> None:
    assert tasks.select((), "x") == KINDS
    assert tasks.select(("sort", "add", "sort"), "x") == ("sort", "add")
    with pytest.raises(UserError, match=r"'x'.*juggle.*there are add"):
        tasks.select(("add", "juggle"), "x")
    chosen = [tasks.choose_kind(KINDS, 0, i) for i in range(2900)]
    assert 60 < chosen.count("talk") < 150  # one in 29
    assert 300 < chosen.count("add") < 500  # four in 29
