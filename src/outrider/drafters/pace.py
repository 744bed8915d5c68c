"""Whether one kind of guesses pays: the one rule by which it is dropped, tried again and taken up again.

All figures are per step of one text: the tokens that the guesses brought beyond the one that comes anyway, and the time
that they took, in units of what a plain step takes for that text.
"""

from __future__ import annotations

import math
from typing import TypeVar

__all__ = ["Pace", "Paces"]

_Some = TypeVar("_Some", bound="Pace")


class Pace:
    """Of one kind of guesses in one text.

    It is dropped when it has lost the time of `_LOST` plain steps since it was last ahead, or brings next to nothing.
    Then it may spend `_SPENT` of the time on trials, and less when `_HOPES` of them have found nothing. A trial that
    gains is followed by another at once, and when those in a row have gained `_WON` tokens more than they cost, it is
    taken up again; twice as many each time that it was soon dropped again. Between the two lie lucky and unlucky steps:
    a step brings 0 to many tokens.
    """

    __slots__ = ("_failed", "_lost", "_need", "_price", "_seen", "_wait", "_won", "cost", "gain", "level", "on")

    _TRIAL = 8  # steps at least before it is dropped
    _LOST = 8.0
    _BEHIND = 2.0  # plain steps lost, with which a text follows what is usual
    _NOTHING = 0.06  # tokens per step, however many one step brings, and as much again as it costs, up to that
    _SPENT = 0.015
    _HOPES = 16  # trials in a row that found nothing, after which less and less is spent on more of them
    _LITTLE = 0.004
    _HELD_UP = 3.0  # a trial counts as this much dearer than the last ones at most: the machine may have been busy
    _LONGEST = 256  # steps between two trials
    _NEAR = 8  # steps before a trial from which on the text is looked at
    _WON, _MOST_WON = 3.0, 12.0
    _LASTING = 200  # steps after which it was no mistake to take it up
    _MOST = 2.0  # that one trial counts for: one lucky step is not enough
    _ALLOWANCE = 0.1  # tokens per trial that do not count: what gains less is not worth a change
    _FOLLOW = 0.1  # how fast the figures follow the last step
    _RISE, _FALL = 0.3, 0.2  # and how fast the price of a trial: dear ones are few, and not to be forgotten between two

    def __init__(self, *, on: bool = True, gain: float = 0.5, cost: float = 0.1) -> None:
        self.on = on
        self.gain, self.cost = gain, cost  # lately
        self.level = min(gain, 1.0)  # the gain if no step brought more than one token
        self._need = self._WON
        self._price = cost  # of a trial
        self._seen = 0
        self._lost = self._won = 0.0
        self._wait = 0  # steps until the next trial
        self._failed = 0  # trials in a row that found nothing

    def begin(self) -> Pace:
        """Of another text, of which nothing is known yet but what is usual."""
        return self._hand_on(Pace(on=self.on, gain=min(self.gain, self.cost + 0.5), cost=self.cost))

    def _hand_on(self, new: _Some) -> _Some:
        new.level = min(self.level, 0.5)
        new._price, new._need, new._failed = self._price, self._need, self._failed
        new._wait = 0 if new.on else self._wait
        return new

    @property
    def near(self) -> bool:
        """Whether such guesses are made or soon tried: what they need to know of the text is to be gathered."""
        return self.on or self._wait <= self._NEAR

    @property
    def hopeful(self) -> bool:
        """Whether such guesses are made, or may yet be found to pay: a prompt, which comes but once, is to be read."""
        return self.on or self._failed < self._HOPES

    @property
    def speedup(self) -> float:
        """Tokens per second with the guesses over those without."""
        return (1 + self.gain) / (1 + self.cost)

    def wanted(self) -> bool:
        """Whether such guesses are to be made in this step. Call once per step."""
        if self.on:
            return True
        if self._wait:
            self._wait -= 1
            return False
        return True

    def saw(self, gain: float, cost: float) -> None:
        """A step with such guesses is done."""
        self.gain += self._FOLLOW * (gain - self.gain)
        self.cost += self._FOLLOW * (cost - self.cost)
        self.level += self._FOLLOW * (min(gain, 1.0) - self.level)
        dear = min(cost, self._HELD_UP * max(self._price, 0.3))
        self._price += (self._RISE if dear > self._price else self._FALL) * (dear - self._price)
        if self.on:
            self._seen += 1
            if self._seen == self._LASTING:
                self._need = self._WON
            self._lost = max(0.0, self._lost + cost - gain)
            if self._seen >= self._TRIAL and self._fails():
                self._drop()
            return
        self._won = max(0.0, self._won + min(gain - cost, self._MOST) - self._ALLOWANCE)
        if self._won >= self._need:
            self.on, self._lost, self._seen, self._failed = True, 0.0, 0, 0
            self._need = min(2 * self._need, self._MOST_WON)
            self.level = max(self.level, 0.5)
        elif not self._won:
            self._failed += 1
            self._wait = self._interval()

    def drop_if_behind(self) -> None:
        """Such guesses have been found not to pay in general: drop them, unless they do in this text."""
        if self.on and self._lost > self._BEHIND:
            self._drop()

    def _fails(self) -> bool:
        """Whether it is to be dropped."""
        return self._lost > self._LOST or self.level < self._least()

    def _drop(self) -> None:
        self.on, self._won = False, 0.0
        self._wait = self._interval()

    def _least(self) -> float:
        return self._NOTHING + min(self.cost, self._NOTHING)

    def _interval(self) -> int:
        """Steps between trials, so that they take no more than their share of the time."""
        spent = max(self._SPENT * min(1.0, self._HOPES / max(1, self._failed)), self._LITTLE)
        return max(0, min(math.ceil(self._price / spent) - 1, self._LONGEST))


class _Usual(Pace):
    """Of one kind of guesses in most texts: one that goes badly for once is no reason to begin the next one without.

    Dropped when the last hundreds of steps have lost time together, a lucky step counting for little more than one
    token. What it begins with weighs as little as it can be found out in one text.
    """

    __slots__ = ("_net", "_weight", "texts")

    _FIRST, _PRIOR = 0.2, 24.0  # plain steps won per step, and the steps that this belief counts for
    _MEMORY = 100.0  # steps

    def __init__(self, *, on: bool = True, gain: float = 0.5, cost: float = 0.1) -> None:
        super().__init__(on=on, gain=gain, cost=cost)
        self._net, self._weight = self._FIRST, self._PRIOR
        self.texts = 1  # that run

    def elsewhere(self, *, on: bool) -> _Usual:
        """With another number of texts."""
        return self._hand_on(_Usual(on=on, gain=min(self.gain, self.cost + 0.5), cost=self.cost))

    def saw(self, gain: float, cost: float) -> None:
        was = self.on
        self._heed(gain, cost)
        super().saw(gain, cost)
        if self.on and not was:
            self._net, self._weight = self._FIRST, self._PRIOR

    def rested(self, pace: Pace) -> None:
        """A text goes on without such guesses: what its last ones were worth still holds, for all that is known."""
        self._heed(pace.gain, pace.cost)
        if self.on and self._fails():
            self._drop()

    def _heed(self, gain: float, cost: float) -> None:
        # a step of many texts says more than a step of one, and less than as many steps: they share their costs
        share = 1 / math.sqrt(self.texts)
        self._weight = min(self._weight + share, self._MEMORY)
        self._net += share * (min(gain, 1.0 + cost) - cost - self._net) / self._weight

    def _fails(self) -> bool:
        return self._net < 0


class Paces:
    """Of one kind of guesses in all texts: each text's own, and for new ones what is usual, by how many texts run.

    What a guess costs, and so whether it pays, depends on the rows that the forward has anyway.
    """

    # How far, in powers of two, the number of texts leaves a class before it is in another: at once where it is far,
    # and where it is not, on average. A text that comes and goes is no change of load.
    _BETWEEN, _FAR, _FOLLOW = 0.75, 1.9, 0.1

    def __init__(self) -> None:
        self._texts: dict[int, Pace] = {}
        self._usual: dict[int, _Usual] = {0: _Usual()}
        self._class = 0  # power of two next to the number of texts
        self._power = 0.0  # the number of texts lately, as a power of two

    @property
    def usual(self) -> _Usual:
        """What is usual with as many texts as run now."""
        return self._usual[self._class]

    def step(self, texts: int) -> bool:
        """A step of so many texts begins. Whether that is another class of load. Call once per step."""
        self.usual.texts = texts
        if self.usual._wait:  # texts may be shorter than the way from one trial to the next
            self.usual._wait -= 1
        power = math.log2(texts)
        self._power += self._FOLLOW * (power - self._power)
        away = abs(power - self._class)
        if away <= self._BETWEEN or (away < self._FAR and abs(self._power - self._class) <= self._BETWEEN):
            return False
        before, self._class, self._power = self.usual, round(power), power
        if self._class not in self._usual:
            # what pays beside many texts pays beside few
            fewer = any(self._class < known for known in self._usual)
            self._usual[self._class] = before.elsewhere(on=before.on or fewer)
        for id, pace in self._texts.items():
            if pace.on != self.usual.on:
                self._texts[id] = self.usual.begin()
        return True

    def of(self, text: int) -> Pace:
        """The text's own."""
        pace = self._texts.get(text)
        if pace is None:
            pace = self._texts[text] = self.usual.begin()
        return pace

    def wanted(self, text: int) -> bool:
        """Whether such guesses are to be made for the text in this step. Call once per step."""
        pace = self.of(text)
        if pace.wanted():
            return True
        self.usual.rested(pace)
        return False

    def saw(self, text: int, gain: float, cost: float) -> None:
        """A step of the text with such guesses is done."""
        pace, usual = self.of(text), self.usual
        pace.saw(gain, cost)
        usual.saw(gain, cost)
        if not usual.on:
            pace.drop_if_behind()

    def forget(self, text: int) -> None:
        """The text is gone."""
        self._texts.pop(text, None)
