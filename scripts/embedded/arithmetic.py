"""Small arithmetic in words and signs. The key is the operation with its operands, so held-out sums were never seen."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from random import Random

from .example import Exchange, Split, admits
from .grammar import spin
from .phrasing import as_typed
from .words import FRUITS, PRODUCTS, first_name

SIGNS = {
    "+": ("+", "plus"),
    "-": ("-", "minus"),
    "*": ("*", "times", "x", "×", "multiplied by"),
    "/": ("/", "divided by", "÷"),
}
ASK = (
    "What is {sum}?", "What is {sum}?", "{sum}", "{sum} =", "{sum}?", "Calculate {sum}.", "How much is {sum}?",
    "Compute {sum}.", "What's {sum}?", "Tell me what {sum} is.", "What does {sum} equal?", "Can you calculate {sum}?",
    "Can you work out {sum} for me?", "Solve {sum}.", "I need the result of {sum}.", "What do you get for {sum}?",
    "Give me the answer to {sum}.", "{sum} is how much?", "Please compute {sum}.", "{sum}=", "{sum}=?", "{sum} = ?", "whats {sum}", "calc {sum}", "do you know what {sum} is?",
)  # fmt: skip


def result_of(left: int, sign: str, right: int) -> int:
    """Return the exact result; division is drawn so that nothing is left over."""
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[sign]


def key_of(left: int, sign: str, right: int) -> str:
    """Return the same key for both orders of a sum or product."""
    if sign in "+*" and left > right:
        left, right = right, left
    return f"{left}{sign}{right}"


def is_easy(left: int, sign: str, right: int) -> bool:
    """Return whether everyone knows it by heart (one digit, the tables up to twelve): that is always in the training
    text."""
    return max(left, right) <= (12 if sign in "*+-" else 144) and right <= 12


def operation(random: Random, split: Split) -> tuple[int, str, int]:
    """Draw operands and sign of the given split."""
    while True:
        sign = random.choice("+++---**/")
        if sign in "+-":
            top = random.choice((10, 20, 100, 100, 100, 1000, 1000))
            left, right = random.randrange(top), random.randrange(top)
            if sign == "-" and right > left and random.random() < 0.85:
                left, right = right, left
        elif sign == "*":
            top = random.choice(((13, 13), (13, 13), (100, 10), (100, 13)))
            left, right = random.randrange(top[0]), random.randrange(top[1])
        else:
            right = random.randrange(1, 13)
            left = right * random.randrange(1, 13)
        if is_easy(left, sign, right):
            if split is Split.TRAIN:
                return left, sign, right
        elif admits(split, key_of(left, sign, right)):
            return left, sign, right


def answer_of(random: Random, left: int, sign: str, right: int) -> str:
    shown = "×" if sign == "*" and random.random() < 0.3 else sign
    result = result_of(left, sign, right)
    return spin(
        random, f"[{left} {shown} {right} = {result}.|{left} {shown} {right} = {result}.|The answer is {result}.]"
    )


def draw(random: Random, split: Split) -> Exchange:
    """Draw a sum, a word problem, a comparison or a short list of numbers."""
    kind = random.random()
    if kind < 0.66:
        return _plain(random, split)
    if kind < 0.86:
        return _word_problem(random, split)
    if kind < 0.91:
        return _comparison(random, split)
    return random.choice((_properties, _properties, _percent, _three, _square))(random, split)


def _plain(random: Random, split: Split) -> Exchange:
    left, sign, right = operation(random, split)
    word = random.choice(SIGNS[sign])
    between = word if not word.isalpha() and random.random() < 0.25 and len(word) == 1 and word != "x" else f" {word} "
    text = as_typed(random, random.choice(ASK).replace("{sum}", f"{left}{between}{right}"))
    result = result_of(left, sign, right)
    follow_ups: tuple[tuple[str, str], ...] = ()
    next_number = random.randrange(1, 21)
    next_sign = random.choice("++-*")
    if 0 < result < 1000 and (next_sign != "*" or result < 100) and (next_sign != "-" or result >= next_number):
        next_number = next_number if next_sign != "*" else random.randrange(2, 6)
        if admits(Split.TRAIN, key_of(result, next_sign, next_number)):
            asked = {
                "+": "[Now add {n}.|And plus {n}?|plus {n}|and plus {n}|What about plus {n}?|Add {n} to that.|plus {n}?|What if you add {n}?]",
                "-": "[Now subtract {n}.|And minus {n}?|minus {n}|and minus {n}|What about minus {n}?|Take away {n}.|minus {n}?|Subtract {n} from that.]",
                "*": "[Now multiply it by {n}.|Times {n}?|And times {n}?|Multiply that by {n}.|times {n}?|times {n}|and times {n}|What about times {n}?]",
            }[next_sign]
            follow_ups = (
                (
                    spin(random, asked, {"n": str(next_number)}),
                    f"{result} {next_sign} {next_number} = {result_of(result, next_sign, next_number)}.",
                ),
            )
    answer = answer_of(random, left, sign, right)
    return Exchange("arithmetic", key_of(left, sign, right), text, answer, (str(result),), follow_ups)


def _word_problem(random: Random, split: Split) -> Exchange:
    while True:
        left, sign, right = operation(random, split)
        if (
            (sign == "-" and right <= left)
            or (sign in "+*" and left < 200 and right > 0)
            or (sign == "/" and right > 1)
        ):
            break
    thing = random.choice((*FRUITS, *PRODUCTS, "book", "coin", "marble", "sticker", "token", "shell"))
    plural = thing[:-1] + "ies" if thing.endswith("ry") else thing + ("es" if thing.endswith(("ch", "s")) else "s")
    slots = {
        "who": first_name(random),
        "other": first_name(random),
        "left": str(left),
        "right": str(right),
        "things": plural,
    }
    pattern = {
        "+": "[{who} has {left} {things} and gets {right} more.|{who} has {left} {things} and buys {right} more.|"
        "There are {left} {things} in one box and {right} in another.|{who} finds {left} {things} on one day and {right} "
        "on the next.] How many {things} [are there|are that] [in total|altogether]?",
        "-": "[{who} has {left} {things} and gives {right} to {other}.|{who} had {left} {things} and lost {right}.|A shop has "
        "{left} {things} and sells {right}.|There are {left} {things} and {right} are broken.] How many {things} are "
        "left?",
        "*": "[There are {left} boxes with {right} {things} each.|{who} buys {left} bags of {right} {things}.|A shop has {left} "
        "shelves and each holds {right} {things}.] How many {things} [are there in total|are that|are there altogether]?",
        "/": "[{left} {things} are shared equally by {right} children.|{who} puts {left} {things} into {right} equal piles.|"
        "{left} {things} go into {right} boxes, the same number in each.] How many {things} [does each get|are in each]?",
    }[sign]
    result = result_of(left, sign, right)
    end = "are left" if sign == "-" else "in each" if sign == "/" else "in total"
    answer = f"{left} {sign} {right} = {result}, so there are {result} {plural} {end}."
    answer = answer.replace("there are", "that is", 1) if sign == "/" else answer
    answer = answer.replace(f"there are {result} {plural} are left", f"{result} {plural} are left")
    return Exchange("arithmetic", key_of(left, sign, right), spin(random, pattern, slots), answer, (str(result),))


def _comparison(random: Random, split: Split) -> Exchange:
    while True:
        top = random.choice((20, 100, 1000))
        left, right = random.randrange(top), random.randrange(random.choice((top, 10, 100, 1000)))
        key = f"compare {min(left, right)} {max(left, right)}"
        if left != right and admits(split, key):
            break
    larger = random.random() < 0.6
    word = random.choice(("larger", "bigger", "greater", "higher") if larger else ("smaller", "lower"))
    pattern = "[Which is {word}, {left} or {right}?|Which number is {word}: {left} or {right}?|What is {word}, {left} or {right}?]"
    user = as_typed(random, spin(random, pattern, {"word": word, "left": str(left), "right": str(right)}))
    right_one, other = (max(left, right), min(left, right)) if larger else (min(left, right), max(left, right))
    return Exchange("arithmetic", key, user, f"{right_one} is {word} than {other}.", (f"{right_one} is",))


def _properties(random: Random, split: Split) -> Exchange:
    while True:
        number = random.randrange(1, 200)
        kind = random.choice(("even", "double", "half", "next", "count"))
        key = f"{kind} {number}"
        if admits(split, key) and (kind != "half" or number % 2 == 0) and (kind != "count" or number < 40):
            break
    slots = {"n": str(number)}
    if kind == "even":
        user, state = "[Is {n} even or odd?|Is {n} an even number?|Is {n} odd?]", "odd" if number % 2 else "even"
        answer, needed = f"{number} is {state}.", state
    elif kind == "double":
        user, needed = "[What is double {n}?|What is twice {n}?|Double {n}.]", str(2 * number)
        answer = f"Twice {number} is {needed}."
    elif kind == "half":
        user, needed = "[What is half of {n}?|Halve {n}.|What's half of {n}?]", str(number // 2)
        answer = f"Half of {number} is {needed}."
    elif kind == "next":
        user, needed = "[What number comes after {n}?|What comes after {n}?|Which number follows {n}?]", str(number + 1)
        answer = f"After {number} comes {needed}."
    else:
        user = "[Count to {n}.|Count from 1 to {n}.|Can you count to {n}?|Please count up to {n}.]"
        answer = ", ".join(map(str, range(1, number + 1))) + "."
        needed = answer
    return Exchange("arithmetic", key, as_typed(random, spin(random, user, slots)), answer, (needed,))


def _percent(random: Random, split: Split) -> Exchange:
    """Draw percentages that leave no fraction."""
    while True:
        share = random.choice((1, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100))
        whole = 10 * random.randrange(1, 51)
        key = f"percent {share} {whole}"
        if share * whole % 100 == 0 and admits(split, key):
            break
    result = str(share * whole // 100)
    user = "[What is {share}% of {whole}?|What is {share} percent of {whole}?|What's {share}% of {whole}?|{share}% of {whole}|How much is {share} % of {whole}?]"
    user = spin(random, user, {"share": str(share), "whole": str(whole)})
    return Exchange("arithmetic", key, as_typed(random, user), f"{share}% of {whole} is {result}.", (f"is {result}.",))


def _three(random: Random, split: Split) -> Exchange:
    """Draw a sum of three numbers."""
    while True:
        numbers = [random.randrange(1, 20) for _ in range(3)]
        key = f"three {sorted(numbers)}"
        if admits(split, key):
            break
    total, result = " + ".join(map(str, numbers)), str(sum(numbers))
    shown = total if random.random() < 0.6 else total.replace(" ", "")
    user = "[What is {shown}?|{shown}|{shown} =|What's {shown}?|Add {first}, {second} and {third}.]"
    slots = {"shown": shown, "first": str(numbers[0]), "second": str(numbers[1]), "third": str(numbers[2])}
    return Exchange("arithmetic", key, as_typed(random, spin(random, user, slots)), f"{total} = {result}.", (result,))


def _square(random: Random, split: Split) -> Exchange:
    """Draw squares and their roots; of the held-out split only those beyond what everyone knows by heart."""
    while True:
        root = random.randrange(1, 13 if split is Split.TRAIN and random.random() < 0.5 else 32)
        if split is Split.TRAIN if root <= 12 else admits(split, f"square {root}"):
            break
    slots = {"n": str(root), "square": str(root * root)}
    if random.random() < 0.5:
        user = "[What is the square root of {square}?|square root of {square}|What's the root of {square}?]"
        answer, needed = f"The square root of {root * root} is {root}.", f"is {root}."
    else:
        user = "[What is {n} squared?|{n} squared|What is the square of {n}?]"
        answer, needed = f"{root} squared is {root * root}.", f"is {root * root}."
    return Exchange("arithmetic", f"square {root}", as_typed(random, spin(random, user, slots)), answer, (needed,))
