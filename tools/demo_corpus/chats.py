"""Conversations: follow-ups after a story, and chats of several turns."""

import random
from dataclasses import replace

from .cast import cast, character
from .facts import ask, fact_named, facts
from .grammar import article, render
from .outside import ask_outside
from .requests import answer, mention, noisy, request
from .stories import LONG, SHORT, Story, plots, tell

Exchange = tuple[str, str]

_SMALL_TALK = ("hello", "hello", "thanks", "praise", "bye", "cando", "whoami", "sad")


def title(story: Story) -> str:
    """Return a title such as `The Fox and the Lantern`, from what the story mentions."""
    hero = story.cast.hero
    need = story.plot.need
    first = f"The {hero.kind}"
    if "thing" in need:
        second = f"the {story.cast.thing}"
    elif "sight" in need:
        second = story.cast.sight
    elif "friend" in need:
        second = f"the {story.cast.friend.kind}"
    else:
        second = "the seed"
    words = f"{first} and {second}".split()
    return " ".join(w if w in ("and", "the") and i else w.capitalize() for i, w in enumerate(words))


def question_about(rng: random.Random, story: Story) -> Exchange:
    """Return a question that the story answers, and the answer."""
    hero = story.cast.hero
    c = story.cast
    options: list[tuple[str, str]] = [
        (
            "{What is|What's} the {moral|lesson}{| of the story| of that story}?",
            f"{{The moral is that|The story says that|The lesson is that}} {story.moral}.",
        ),
        (
            "{Who is {the story|it} about|Who is the main character|Who was that about}?",
            f"{{It is about|The story is about}} {hero.intro}.",
        ),
        (
            (
                "{Where does {it|the story} {take place|happen}|Where was that|"
                "Where did {he|she} live}?"
            ).replace("{he|she}", "she" if hero.she else "he"),
            f"{{It takes place|The story takes place|It happens}} {c.preposition} {c.place}.",
        ),
        (
            "{What is the title|Give it a title|What would you call {it|this story}|"
            "Can you give it a title}?",
            f'{{You could call it|I would call it|A good title is}} "{title(story)}".',
        ),
    ]
    name = f"{hero.name}" if hero.name else ""
    options.append(
        (
            f"{{What is the {hero.kind}'s name|What was the {hero.kind} called"
            f"|What is the name of the {{{hero.kind}|main character|hero}}}}?",
            f"{{The {hero.kind} is called {name}|The {hero.kind}'s name is {name}}}."
            if name
            else f"The {hero.kind} has no name in {{the|this}} story.",
        )
    )
    if "friend" in story.plot.need:
        options.append(
            (
                "{Who else is in the story|Who is the {other|second} character"
                f"|Who does {hero.name or 'the ' + hero.kind} meet}}?",
                f"{{There is|There is also}} {c.friend.intro}.",
            )
        )
    question, reply = rng.choice(options)
    return noisy(rng, render(rng, question)), render(rng, reply)


def _same_with(rng: random.Random, story: Story, story_cast_change: str) -> tuple[str, Story]:
    """Return a request for the same plot with one ingredient changed, and the story."""
    c = replace(story.cast, named=set())
    if story_cast_change == "thing" and "thing" in story.plot.need:
        c.thing = cast(rng).thing
        a_thing = f"{article(c.thing)} {c.thing}"
        said = rng.choice(
            [
                f"Now with {a_thing}",
                f"Use {a_thing} instead",
                f"Change the {story.cast.thing} to {a_thing}",
                f"Can it be {a_thing} instead of a {story.cast.thing}?",
            ]
        )
    else:
        hero, c.hero = mention(rng, character(rng, c.friend.kind.replace(" ", "_")))
        said = render(
            rng,
            "{Make it about|Now about|The same with|Now make it about|Now with|Change it to|"
            "How about|What about|And about|Do it with} <x>",
            {"x": hero},
        )
    return noisy(rng, said), tell(rng, c, story.plot, SHORT if rng.random() < 0.5 else 1)


def _another(rng: random.Random, story: Story) -> tuple[str, Story]:
    """Return a request for a new story, or for the old one at another length, and the story."""
    roll = rng.random()
    if roll < 0.4:
        said = render(
            rng,
            "{Another one|Another|One more|Tell me another one|Tell me another story|More|Again|"
            "Next|And another one|Another story|Can I have another one?|Do you have another one?}",
        )
        return noisy(rng, said), tell(rng, cast(rng), rng.choice(plots()))
    if roll < 0.6:
        c = replace(cast(rng), hero=story.cast.hero)
        who = c.hero.name or f"the {c.hero.kind}"
        said = f"{{Another|One more|Tell me another|A new}} story about {who}{{|, please}}"
        return noisy(rng, render(rng, said)), tell(rng, c, rng.choice(plots()))
    c = replace(story.cast, named=set())
    if roll < 0.8:
        said = "{{Make|Can you make} it {shorter|short}|Shorter|A shorter one|Too long}"
        return noisy(rng, render(rng, said)), tell(rng, c, story.plot, SHORT)
    said = "{{Make|Can you make} it {longer|a bit longer}|Longer|A longer one|Too short}"
    return noisy(rng, render(rng, said)), tell(rng, c, story.plot, LONG)


def _after_story(rng: random.Random, story: Story) -> tuple[Exchange, Story]:
    roll = rng.random()
    if roll < 0.4:
        return question_about(rng, story), story
    if roll < 0.7:
        said, new = _same_with(rng, story, rng.choice(["hero", "hero", "thing"]))
    else:
        said, new = _another(rng, story)
    return (said, new.text), new


def story_exchange(rng: random.Random) -> tuple[Exchange, Story]:
    wanted = request(rng)
    story = answer(rng, wanted)
    text = story.text
    if rng.random() < 0.03:
        prompt = wanted.prompt.rstrip(".?!") + rng.choice([" with a title", ". Add a title."])
        return (prompt, f"**{title(story)}**\n\n{text}"), story
    return (wanted.prompt, text), story


def fact_exchange(rng: random.Random) -> Exchange:
    question, reply = ask(rng, rng.choice(facts()))
    return noisy(rng, question), reply


def small_talk(rng: random.Random) -> Exchange:
    question, reply = ask(rng, fact_named(rng.choice(_SMALL_TALK)))
    return noisy(rng, question), reply


def outside_exchange(rng: random.Random) -> Exchange:
    question, reply = ask_outside(rng)
    return noisy(rng, question), reply


def conversation(rng: random.Random, turns: int) -> list[Exchange]:
    """Return a chat that moves between stories, facts and small talk; some end with thanks."""
    exchanges: list[Exchange] = []
    story: Story | None = None
    if rng.random() < 0.2:
        exchanges.append(ask(rng, fact_named("hello")))
    while len(exchanges) < turns:
        roll = rng.random()
        if story is not None and roll < 0.6:
            exchange, story = _after_story(rng, story)
        elif roll < 0.75:
            exchange, story = story_exchange(rng)
        elif roll < 0.92:
            exchange = fact_exchange(rng)
            if exchanges and rng.random() < 0.3:
                lead = rng.choice(["And ", "and ", "OK, ", "So ", "Thanks. "])
                exchange = (lead + exchange[0], exchange[1])
        elif roll < 0.96:
            exchange = outside_exchange(rng)
        else:
            exchange = small_talk(rng)
        exchanges.append(exchange)
    if rng.random() < 0.15:
        exchanges.append(ask(rng, fact_named(rng.choice(["thanks", "praise", "bye"]))))
    return exchanges
