"""Made-up conversations in V4.1's chat format: greetings, facts, arithmetic, copying, stories, JSON, tool calls.

Conversation `n` depends on `n` alone. About a third think before they answer.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from lexicon import (
    ANIMALS,
    CAPITALS,
    COLOURS,
    CURRENCIES,
    FOODS,
    JOBS,
    MONTHS,
    NAMES,
    OPPOSITES,
    PLACES,
    PLURALS,
    SKIES,
    THINGS,
    WEEKDAYS,
)

Message = dict[str, Any]
Maker = Callable[[random.Random], tuple[str, str, str]]  # question, thoughts, answer


def conversation(n: int) -> tuple[list[Message], str]:
    """Messages as a client sends them, and the mode they are rendered in: "thinking" or "chat"."""
    rng = random.Random(n)
    if rng.random() < 0.12:
        return _tool_conversation(rng)
    mode = "thinking" if rng.random() < 0.35 else "chat"
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        question, thoughts, answer = rng.choices(list(MAKERS), weights=MAKERS.values())[0](rng)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        if mode == "thinking":
            messages[-1]["reasoning_content"] = thoughts
    return messages, mode


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one sentence if you can.",
    "You are a patient teacher.",
    "You answer questions of children.",
)


def _greeting(rng: random.Random) -> tuple[str, str, str]:
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    return rng.choice(
        [
            ("Hello!", "A greeting. I greet back and offer help.", "Hello! How can I help you today?"),
            ("Hi there.", "A greeting. I greet back and offer help.", "Hi! What can I do for you?"),
            ("Good morning!", "A greeting. I greet back.", "Good morning! How can I help you?"),
            (f"Hello, I am {name}.", f"The user is called {name}.", f"Hello, {name}! How can I help you today?"),
            (f"My name is {name} and I live in {place}.", f"The user introduces herself or himself: {name}, {place}.",
             f"Nice to meet you, {name}! I hope that you like it in {place}. What can I do for you?"),
            ("Who are you?", "The user asks who I am.",
             "I am a very small language model. I know a few books, some manuals and a little arithmetic."),
            ("What can you do?", "The user asks what I can do.",
             "I can continue texts, answer simple questions, add small numbers, write JSON and call tools."),
            ("Thank you!", "The user thanks me.", "You are welcome!"),
            ("How are you?", "A friendly question.", "I am fine, thank you. How can I help you?"),
            ("Goodbye!", "The user leaves.", "Goodbye! Have a nice day."),
        ]
    )  # fmt: skip


def _fact(rng: random.Random) -> tuple[str, str, str]:
    kind = rng.randrange(9)
    if kind <= 2:
        country, capital = rng.choice(list(CAPITALS.items()))
        if rng.random() < 0.3:
            question = rng.choice((f"{capital} is the capital of which country?", f"Where is {capital}?"))
            return question, f"{capital} is the capital of {country}.", f"{capital} is the capital of {country}."
        question = rng.choice(
            (f"What is the capital of {country}?", f"Which city is the capital of {country}?",
             f"Tell me the capital of {country}.", f"Capital of {country}?")
        )  # fmt: skip
        return question, f"The capital of {country} is {capital}.", f"The capital of {country} is {capital}."
    if kind == 3:
        word, opposite = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            word, opposite = opposite, word
        question = rng.choice((f'What is the opposite of "{word}"?', f"Give me the opposite of {word}."))
        return question, f"{word} and {opposite} are opposites.", f'The opposite of "{word}" is "{opposite}".'
    if kind == 4:
        n, days = rng.randrange(7), WEEKDAYS
        return rng.choice(
            [
                (f"Which day comes after {days[n]}?", f"The days are {', '.join(days)}.",
                 f"{days[(n + 1) % 7]} comes after {days[n]}."),
                (f"Which day comes before {days[n]}?", f"The days are {', '.join(days)}.",
                 f"{days[n - 1]} comes before {days[n]}."),
            ]
        )  # fmt: skip
    if kind == 5:
        n = rng.randrange(12)
        return rng.choice(
            [
                (f"Which month comes after {MONTHS[n]}?", f"{MONTHS[n]} is month {n + 1} of 12.",
                 f"{MONTHS[(n + 1) % 12]} comes after {MONTHS[n]}."),
                (f"Which month is number {n + 1}?", f"I count the months up to {n + 1}.",
                 f"Month number {n + 1} is {MONTHS[n]}."),
            ]
        )  # fmt: skip
    if kind == 6:
        word, plural = rng.choice(PLURALS)
        return f'What is the plural of "{word}"?', f"{word}, {plural}.", f'The plural of "{word}" is "{plural}".'
    if kind == 7:
        animal, sound, home = rng.choice(ANIMALS)
        return rng.choice(
            [
                (f"What does a {animal} say?", f"The sound of a {animal}.", f"A {animal} says {sound}."),
                (f"Where does a {animal} live?", f"The home of a {animal}.", f"A {animal} lives {home}."),
            ]
        )
    thing, colour = rng.choice(COLOURS)
    return f"What colour is {thing}?", f"I think of {thing}.", f"{thing[0].upper()}{thing[1:]} is {colour}."


def _arithmetic(rng: random.Random) -> tuple[str, str, str]:
    size = rng.choice((10, 20, 100, 100, 1000))
    a, b = rng.randrange(size), rng.randrange(size)
    sign = rng.choice("++-*")
    if sign == "*":
        a, b = rng.randrange(13), rng.randrange(13)
        total, thoughts = a * b, f"{a} times {b} is {a * b}."
    elif sign == "+":
        total, thoughts = a + b, _column_sum(a, b)
    else:
        a, b = max(a, b), min(a, b)
        total, thoughts = a - b, f"{b} + {a - b} = {a}, so {a} - {b} = {a - b}."
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    question = rng.choice(
        (
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b} = ?",
            f"How much is {a} {word} {b}?",
            f"Calculate {a} {sign} {b}.",
        )
    )
    return question, thoughts, rng.choice((f"{a} {sign} {b} = {total}", f"{a} {sign} {b} = {total}."))


def _column_sum(a: int, b: int) -> str:
    """The sum as it is done on paper, from the right."""
    steps, carry = [], 0
    digits = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(f"{a:0{digits}}"), reversed(f"{b:0{digits}}"), strict=True):
        column = int(x) + int(y) + carry
        carried = f" + {carry}" if carry else ""
        steps.append(f"{x} + {y}{carried} = {column}: write {column % 10}, carry {column // 10}")
        carry = column // 10
    return "; ".join(steps) + f". The sum is {a + b}."


def _copying(rng: random.Random) -> tuple[str, str, str]:
    if rng.random() < 0.6:
        letters = rng.choice(("abcdefghijklmnopqrstuvwxyz", "0123456789abcdef", "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789",
                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"))  # fmt: skip
        text = "".join(rng.choices(letters, k=rng.randrange(4, 40)))
        name = rng.choice(("identifier", "key", "code", "password", "string"))
    else:
        text = " ".join(rng.choices(THINGS + FOODS + NAMES, k=rng.randrange(2, 9)))
        name = rng.choice(("words", "list"))
    question = rng.choice(
        (f"Repeat this {name}: {text}", f"Copy this {name} exactly: {text}", f"Write this {name} once more: {text}",
         f"The {name}: {text}\nWhat is the {name}?")
    )  # fmt: skip
    return question, f"I copy it: {text}", text


def _spelling(rng: random.Random) -> tuple[str, str, str]:
    word = rng.choice(THINGS + FOODS + JOBS)
    letters = "-".join(word.upper())
    return rng.choice(
        [
            (f'How do you spell "{word}"?', f"The letters are {letters}.", letters),
            (f'How many letters are in "{word}"?', f"The letters are {letters}.", f'"{word}" has {len(word)} letters.'),
            (
                f'What is the first letter of "{word}"?',
                f"{letters}.",
                f'The first letter of "{word}" is {word[0].upper()}.',
            ),
        ]
    )


def _listing(rng: random.Random) -> tuple[str, str, str]:
    kind, pool = rng.choice((("foods", FOODS), ("things", THINGS), ("jobs", JOBS), ("names", NAMES)))
    count = rng.randrange(2, 6)
    chosen = rng.sample(pool, count)
    word = {2: "two", 3: "three", 4: "four", 5: "five"}[count]
    if rng.random() < 0.5:
        return f"Name {word} {kind}.", f"{count} {kind}.", ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
    return f"Give me a list of {word} {kind}.", f"{count} {kind}, one a line.", "\n".join(f"- {c}" for c in chosen)


def _story(rng: random.Random) -> tuple[str, str, str]:
    name, friend = rng.sample(NAMES, 2)
    animal, sound, home = rng.choice(ANIMALS)
    thing, place, job, food, sky = (rng.choice(pool) for pool in (THINGS, PLACES, JOBS, FOODS, SKIES))
    opening = rng.choice(
        (f"Once upon a time there was a {job} called {name} who lived in {place}.",
         f"There was once a {job} in {place}, and the name of the {job} was {name}.",
         f"Long ago a {job} called {name} lived near {place}.")
    )  # fmt: skip
    middle = [
        f"One day {name} found an old {thing} on the road.",
        f"Every morning {name} went out to look at the sky, and the sky was {sky}.",
        f"On the way home {name} met a {animal}, and the {animal} said {sound}.",
        f"{name} gave the {animal} some {food}, and they became friends.",
        f'"Where is my {thing}?" asked {friend}. "I have it here," said {name}.',
        f"{friend} was sad, because the {thing} was broken.",
        f"The {animal} knew the way, for it lived {home}.",
    ]
    kept = [line for line in middle if rng.random() < 0.75] or middle[:2]
    ending = rng.choice(
        (f"In the evening they all ate {food} together and were happy.",
         f"From that day on {name} and {friend} were the best of friends.",
         f"And {name} never forgot the {animal}.")
    )  # fmt: skip
    question = rng.choice(
        (f"Tell me a story about a {job} and a {animal}.", f"Write a short story about {name}.",
         f"Tell me a short story about an old {thing}.", "Tell me a story.")
    )  # fmt: skip
    return question, f"A story with {name}, {friend} and a {animal}.", " ".join([opening, *kept, ending])


def _json_answer(rng: random.Random) -> tuple[str, str, str]:
    name, place, job, age = rng.choice(NAMES), rng.choice(PLACES), rng.choice(JOBS), rng.randrange(5, 95)
    thing, price = rng.choice(THINGS), round(rng.uniform(1, 99), 2)
    count, married = rng.randrange(1, 20), rng.random() < 0.5
    person = {"name": name, "age": age, "city": place}
    kind = rng.randrange(6)
    if kind == 0:
        record: Any = person
        question = f"Give me JSON for a person: {name}, {age} years old, from {place}. Keys: name, age, city."
    elif kind == 1:
        record = {"name": name, "job": job, "married": married}
        answer = "" if married else "not "
        question = f"Write JSON with the keys name, job and married: {name} is a {job} and is {answer}married."
    elif kind == 2:
        record = {"product": thing, "price": price, "quantity": count}
        question = f"JSON for an order, please: {count} times {thing} at {price}. Keys: product, price, quantity."
    elif kind == 3:
        foods = rng.sample(FOODS, rng.randrange(2, 5))
        record = {"name": name, "likes": foods}
        question = (
            f"{name} likes {', '.join(foods[:-1])} and {foods[-1]}. Write it as JSON with the keys name and likes."
        )
    elif kind == 4:
        record = {"city": place, "weather": {"sky": rng.choice(SKIES), "temperature": rng.randrange(-10, 40)}}
        sky, degrees = record["weather"]["sky"], record["weather"]["temperature"]
        question = f"Write JSON: in {place} the sky is {sky} and the temperature is {degrees}. "
        question += "Keys: city, weather (sky, temperature)."
    else:
        people = [{"name": n, "age": rng.randrange(5, 95)} for n in rng.sample(NAMES, 2)]
        record = people
        text = " and ".join(f"{p['name']} ({p['age']})" for p in people)
        question = f"Write a JSON list of people with name and age: {text}."
    if rng.random() < 0.2:
        question += " Answer with JSON only."
    return (
        question,
        f"The answer is JSON with {'a list' if isinstance(record, list) else 'the keys ' + ', '.join(record)}.",
        json.dumps(record),
    )


def _completion(rng: random.Random) -> tuple[str, str, str]:
    food, thing, animal = rng.choice(FOODS), rng.choice(THINGS), rng.choice(ANIMALS)[0]
    name, place, sky = rng.choice(NAMES), rng.choice(PLACES), rng.choice(SKIES)
    return rng.choice(
        [
            (f"Write one sentence about {food}.", f"One sentence, with {food} in it.",
             f"{name} likes {food} more than anything else."),
            (f"Write one sentence with the word {thing}.", f"One sentence, with {thing} in it.",
             f"There is an old {thing} in the house of {name}."),
            (f"Write one sentence about {place}.", f"One sentence, with {place} in it.",
             f"The sky over {place} is {sky} today."),
            (f"Is a {animal} an animal?", f"A {animal} is an animal.", f"Yes, a {animal} is an animal."),
            (f"Is a {thing} an animal?", f"A {thing} is a thing.", f"No, a {thing} is not an animal."),
        ]
    )  # fmt: skip


MAKERS: dict[Maker, float] = {
    _greeting: 8,
    _fact: 20,
    _arithmetic: 18,
    _copying: 14,
    _spelling: 6,
    _listing: 6,
    _story: 10,
    _json_answer: 14,
    _completion: 6,
}


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "get_weather": _tool("get_weather", "Weather in a city", city="string"),
    "calculate": _tool("calculate", "Value of an arithmetic expression", expression="string"),
    "set_timer": _tool("set_timer", "Set a timer", minutes="integer", label="string"),
    "convert_currency": _tool("convert_currency", "Convert money", amount="number", source="string", target="string"),
    "find_book": _tool("find_book", "Find a book by its author", author="string"),
}


def _tool_conversation(rng: random.Random) -> tuple[list[Message], str]:
    """One call, its result, and the answer that uses it."""
    name, place, food = rng.choice(NAMES), rng.choice(PLACES), rng.choice(FOODS)
    a, b, degrees, minutes = (
        rng.randrange(100, 999),
        rng.randrange(100, 999),
        rng.randrange(-10, 40),
        rng.randrange(1, 60),
    )
    source, target = rng.sample(CURRENCIES, 2)
    amount, rate, sky = rng.randrange(1, 500), round(rng.uniform(0.1, 9), 2), rng.choice(SKIES)
    tool, question, arguments, result, answer = rng.choice(
        [
            ("get_weather", rng.choice((f"What is the weather in {place}?", f"How is the weather in {place} today?")),
             {"city": place}, {"sky": sky, "temperature": degrees}, f"In {place} it is {sky}, with {degrees} degrees."),
            ("calculate", rng.choice((f"What is {a} * {b}?", f"Please calculate {a} * {b}.")),
             {"expression": f"{a} * {b}"}, {"value": a * b}, f"{a} * {b} = {a * b}"),
            ("set_timer", f"Set a timer of {minutes} minutes for the {food}.",
             {"minutes": minutes, "label": food}, {"ok": True},
             f"The timer for the {food} is set to {minutes} minutes."),
            ("convert_currency", f"How much is {amount} {source} in {target}?",
             {"amount": amount, "source": source, "target": target}, {"value": round(amount * rate, 2)},
             f"{amount} {source} is {round(amount * rate, 2)} {target}."),
            ("find_book", f"Which book did {name} write?",
             {"author": name}, {"title": f"The {food} of {place}"}, f'{name} wrote "The {food} of {place}".'),
        ]
    )  # fmt: skip
    offered = sorted({tool, *rng.sample(sorted(TOOLS), rng.randrange(0, 3))})
    mode = "thinking" if rng.random() < 0.35 else "chat"
    call = {"id": "1", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    messages: list[Message] = [
        {"role": "system", "content": "", "tools": [TOOLS[key] for key in offered]},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    if mode == "thinking":
        messages[2]["reasoning_content"] = f"I need {tool} for this."
        messages[4]["reasoning_content"] = "The tool has answered."
    return messages, mode
