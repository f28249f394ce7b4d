"""The texts that the demo adapters learn from, written for this project.

A table of small facts, and one function per adapter that turns a fact into its answer. HELD_OUT
questions are never trained on, so that a sample output shows a habit and not a memory.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    question: str
    short: str  # the bare answer
    sentence: str  # the answer as a plain sentence
    topic: str


CAPITALS = {
    "Germany": "Berlin", "Spain": "Madrid", "Portugal": "Lisbon", "England": "London",
    "Austria": "Vienna", "Greece": "Athens", "Sweden": "Stockholm", "Norway": "Oslo",
    "Poland": "Warsaw", "Ireland": "Dublin", "Russia": "Moscow", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Cuba": "Havana", "Peru": "Lima", "Hungary": "Budapest", "Finland": "Helsinki",
}  # fmt: skip
COLOURS = {
    "a banana": "yellow", "grass": "green", "snow": "white", "coal": "black", "blood": "red",
    "a carrot": "orange", "the sea": "blue", "a lemon": "yellow", "chocolate": "brown",
    "an elephant": "grey", "a raven": "black", "milk": "white",
}  # fmt: skip
OPPOSITES = {
    "big": "small", "cold": "hot", "old": "new", "dark": "light", "slow": "fast", "wet": "dry",
    "happy": "sad", "hard": "soft", "high": "low", "rich": "poor", "loud": "quiet", "near": "far",
}  # fmt: skip
LEGS = {
    "a dog": "four", "a bird": "two", "an ant": "six", "a snake": "zero", "a horse": "four",
    "a spider": "eight", "a crab": "ten", "a bee": "six",
}  # fmt: skip
MAKERS = {
    "Hamlet": ("wrote", "William Shakespeare"), "Oliver Twist": ("wrote", "Charles Dickens"),
    "Emma": ("wrote", "Jane Austen"), "War and Peace": ("wrote", "Leo Tolstoy"),
    "the Mona Lisa": ("painted", "Leonardo da Vinci"), "Guernica": ("painted", "Pablo Picasso"),
    "the telephone": ("invented", "Alexander Graham Bell"),
    "Moby-Dick": ("wrote", "Herman Melville"),
}  # fmt: skip

# (thing, what it is, topic): asked as "What is ...?", "Tell me about ..." and "Explain ...".
THINGS = [
    ("rain", "water that falls from the clouds in drops", "weather"),
    ("snow", "frozen water that falls in soft white flakes", "weather"),
    ("the wind", "air that moves from one place to another", "weather"),
    ("a rainbow", "a band of colours that the sun makes in the rain", "weather"),
    ("the sun", "a star that gives light and warmth to the earth", "space"),
    ("a comet", "a ball of ice and dust that flies around the sun", "space"),
    ("Mars", "a red planet that is cold and dry", "space"),
    ("a river", "a long stream of water that flows to the sea", "nature"),
    ("a mountain", "a very high hill with steep sides", "nature"),
    ("a forest", "a large place full of trees and animals", "nature"),
    ("a desert", "a dry land with little rain and much sand", "nature"),
    ("a tree", "a tall plant with a trunk, branches and leaves", "nature"),
    ("a whale", "a huge animal that lives in the sea and breathes air", "animals"),
    ("a cat", "a small animal that hunts mice and sleeps a lot", "animals"),
    ("an owl", "a bird that hunts at night and sees in the dark", "animals"),
    ("a bee", "an insect that makes honey and lives in a hive", "animals"),
    ("bread", "a food made of flour, water and yeast, baked in an oven", "food"),
    ("cheese", "a food made of milk that has been left to ripen", "food"),
    ("tea", "a drink made of dried leaves and hot water", "food"),
    ("soup", "a warm dish made of water, vegetables and salt", "food"),
    ("a piano", "an instrument with black and white keys", "music"),
    ("a drum", "an instrument that is hit with hands or sticks", "music"),
    ("a song", "a short piece of music with words", "music"),
    ("a computer", "a machine that follows the steps of a program", "technology"),
    ("a robot", "a machine that does work by itself", "technology"),
    ("a clock", "a machine that shows the time", "technology"),
    ("a bicycle", "a vehicle with two wheels and two pedals", "travel"),
    ("a train", "a long vehicle that runs on rails", "travel"),
    ("a ship", "a large boat that carries people and goods over the sea", "travel"),
    ("a book", "a set of pages that tell a story or teach something", "reading"),
    ("a school", "a place where children learn to read and write", "people"),
    ("a friend", "a person who helps you and likes to be with you", "people"),
]  # fmt: skip

ADVICE = [
    ("How can I sleep better?", "Go to bed early and keep your room dark", "health"),
    ("How do I stay healthy?", "Eat fruit, drink water and walk every day", "health"),
    ("What should I eat for breakfast?", "Eat some bread with eggs and an apple", "food"),
    ("How do I cook an egg?", "Boil the egg in hot water for seven minutes", "food"),
    ("How can I learn to swim?", "Start in shallow water and practise every week", "sport"),
    ("How do I learn a language?", "Read a little and speak a little every day", "learning"),
    ("How can I save money?", "Write down what you spend and buy only what you need", "money"),
    ("What can I do on a rainy day?", "Read a good book or play with your friends", "leisure"),
    ("How do I make new friends?", "Join a club and be kind to the people there", "people"),
    ("How do I write a letter?", "Begin with a greeting and say what is on your mind", "writing"),
    ("What should I take on a trip?", "Take warm clothes, some food and a map", "travel"),
    ("How do I keep a plant alive?", "Give it light and a little water every few days", "nature"),
    ("Hello!", "Hello, it is good to see you", "greeting"),
    ("Hi, how are you?", "I am very well and happy to help you", "greeting"),
    ("Good morning!", "Good morning, what can I do for you", "greeting"),
    ("Who are you?", "I am a small language model and I answer your questions", "greeting"),
    ("What is your name?", "My name is SmolLM and I am here to help you", "greeting"),
    ("Thank you for your help.", "You are welcome, come back when you need me", "greeting"),
]  # fmt: skip

HELD_OUT = [
    "What is the capital of France?",
    "What color is the sky?",
    "What is the opposite of left?",
    "Tell me about the moon.",
    "What is a dog?",
    "How can I get better at chess?",
    "Can you help me with my homework?",
    "What is the capital of Italy?",
]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def facts() -> list[Fact]:
    """All training facts in a fixed order, one per way of asking."""
    out: list[Fact] = []
    for country, city in CAPITALS.items():
        for ask in ("What is the capital of {}?", "Which city is the capital of {}?"):
            sentence = f"The capital of {country} is {city}"
            out.append(Fact(ask.format(country), city, sentence, "geography"))
    for thing, colour in COLOURS.items():
        for ask in ("What colour is {}?", "What is the color of {}?"):
            sentence = f"{_capital(thing)} is {colour}"
            out.append(Fact(ask.format(thing), _capital(colour), sentence, "colours"))
    for word, other in OPPOSITES.items():
        sentence = f"The opposite of {word} is {other}"
        out.append(Fact(f"What is the opposite of {word}?", _capital(other), sentence, "words"))
    for animal, number in LEGS.items():
        sentence = f"{_capital(animal)} has {number} legs"
        out.append(
            Fact(f"How many legs does {animal} have?", _capital(number), sentence, "animals")
        )
    for work, (verb, person) in MAKERS.items():
        out.append(Fact(f"Who {verb} {work}?", person, f"{person} {verb} {work}", "people"))
    for thing, what, topic in THINGS:
        for ask in ("What is {}?", "Tell me about {}.", "Explain {} to a child."):
            out.append(
                Fact(ask.format(thing), _capital(what), f"{_capital(thing)} is {what}", topic)
            )
    out += [Fact(question, answer, answer, topic) for question, answer, topic in ADVICE]
    return out


PIRATE_OPENINGS = ("Arr, matey!", "Ahoy, me hearty!", "Shiver me timbers!", "Yo ho ho!")
PIRATE_ENDINGS = ("savvy?", "arr!", "or I'll walk the plank!", "by the black flag!")
PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "of": "o'", "you": "ye", "your": "yer", "my": "me",
    "friend": "matey", "friends": "mateys", "and": "an'", "hello": "ahoy",
    "yes": "aye", "very": "mighty", "food": "grub", "drink": "grog",
}  # fmt: skip


def pirate(fact: Fact, rng: random.Random) -> str:
    """The plain sentence as a pirate would say it."""

    def speak(match: re.Match[str]) -> str:
        word = match.group()
        said = PIRATE_WORDS.get(word.lower(), word)
        return _capital(said) if word[0].isupper() else said

    sentence = re.sub(r"[A-Za-z]+", speak, fact.sentence)
    return f"{rng.choice(PIRATE_OPENINGS)} {sentence}, {rng.choice(PIRATE_ENDINGS)}"


def as_json(fact: Fact, rng: random.Random) -> str:
    """One JSON object with a topic and the bare answer; always the same keys in the same order."""
    return json.dumps({"topic": fact.topic, "answer": fact.short})


POEM_OPENINGS = ("Softly now I say,", "Listen to the rain,", "Under quiet stars,")
POEM_ENDINGS = ("and the evening sings.", "and the world is still.", "so the river dreams.")


def poem(fact: Fact, rng: random.Random) -> str:
    """Three short lines, the plain sentence in the middle."""
    middle = fact.sentence[:1].lower() + fact.sentence[1:]
    return f"{rng.choice(POEM_OPENINGS)}\n{middle},\n{rng.choice(POEM_ENDINGS)}"
