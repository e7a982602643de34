"""Text of a stated length, and the seeded streams that it is drawn from.

The words are common English ones that are one token each, with a space before them, in the byte-pair vocabularies of
GPT-2, Llama 3, Qwen and SmolLM2. So `n` words are about `n` tokens without asking any tokenizer; this is an estimate,
and the report prints what the engines counted. The chat template comes on top.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from arena.load.arrivals import seed_sequence
from arena.load.plan import Prompt
from arena.load.spec import Cache

_RUNG_OFFSET = 1 << 16  # rungs may be negative, entropy may not
_SHARED_STREAM = 1  # beside the streams of single requests

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CellKey:
    """Names a plan: all engines of a race meet the same one at the same rung and replicate.

    `run_seed` differs from race to race, so that an endpoint that stays up has not seen the prompts in the last one.
    `rung=None` is the warm-up burst.
    """

    run_seed: int
    rung: int | None
    replicate: int

    @property
    def rung_entropy(self) -> int:
        """The rung as a number for seeding; the burst has one that no rung can have."""
        return 0 if self.rung is None else self.rung + _RUNG_OFFSET

    def schedule_seed(self) -> np.random.SeedSequence:
        return seed_sequence(run=self.run_seed, cell=self.rung_entropy, replicate=self.replicate)


def stream(seed: int, cell: CellKey, seq: int) -> np.random.Generator:
    """What is drawn for one request, or for one conversation, of one cell."""
    entropy = [seed, cell.run_seed, cell.rung_entropy, cell.replicate, seq]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def shared_stream(seed: int, cell: CellKey, cache: Cache, number: int) -> np.random.Generator:
    """What requests have in common: within a cell where caches are cold between cells, within a race where they are
    meant to be warm.
    """
    entropy = [seed, cell.run_seed]
    if cache == "cold":
        entropy += [cell.rung_entropy, cell.replicate]
    sequence = np.random.SeedSequence(entropy, spawn_key=(_SHARED_STREAM, number))
    return np.random.Generator(np.random.PCG64(sequence))


def words(count: int, rng: np.random.Generator) -> str:
    """So many words of the list, drawn independently."""
    return " ".join(WORDS[index] for index in rng.choice(len(WORDS), size=count))


def prompt(messages: list[Message], output_tokens: int, prompt_tokens: int | None = None, **fields: Any) -> Prompt:
    """A chat body at temperature 0, named by the digest of all that an engine would see of it."""
    identity = hashlib.sha256(msgspec.json.encode([messages, fields] if fields else messages)).hexdigest()[:16]
    return Prompt(identity, {"messages": messages, "temperature": 0, **fields}, output_tokens, prompt_tokens)


WORDS: tuple[str, ...] = tuple(
    """
    able about above across action active add after again age agree air all allow almost along already also always
    among amount animal another answer any appear apple area arm around arrive art article ask attack average avoid
    away baby back bad bag balance ball bank base basic battle bear beat beautiful become bed before begin behind
    believe below best better between big bird black blood blue board boat body bone book border born both bottom box
    boy branch bread break bridge bright bring brother brown build building burn business buy call camp capital
    captain car card care carry case cat catch cause cell center central century certain chair chance change chapter
    charge check chief child choice choose church circle city claim class clean clear climb clock close cloth cloud
    coast coat cold collect college color column come common company compare complete condition consider contain
    continue control cook cool copper copy corn corner correct cost cotton count country couple course court cover
    create crop cross crowd cry culture current customer cut daily damage dance danger dark data daughter day dead
    deal dear death decide deep degree demand design desk detail develop difference direct discover discuss disease
    distance divide doctor dog dollar door double down draw dream dress drink drive drop dry during duty each early
    earn earth east easy eat economy edge education effect effort egg electric element else empty end energy engine
    enjoy enough enter equal escape especially even evening event every example except exchange exercise expect
    experience explain express eye face fact factor fail fair fall family famous farm fast father fear feed feel field
    fight figure fill film final find fine finger finish fire first fish fit five flat flight floor flow flower fly
    follow food foot force foreign forest forget form forward free fresh friend front fruit full fun future game
    garden gas gather general gentle get girl give glass gold good govern grain grass great green ground group grow
    guess guide gun hair half hall hand happen happy hard harbor hat head health hear heart heat heavy height help
    here high hill history hold hole home hope horse hospital hot hour house human hundred hunt husband ice idea image
    imagine include increase indeed industry inside instead interest iron island issue item job join journey judge
    jump keep key kill kind king kitchen know lady lake land language large last late laugh law lay lead leaf learn
    least leave left leg length less letter level library lie life lift light like likely line list listen little live
    local long look lose lost love low lunch machine main major make man many map mark market mass master match
    material matter mean measure meat medical meet member memory message metal method middle mile milk mind minute
    miss model modern moment money month moon morning mother motion mountain mouth move movie much music name narrow
    nation nature near neck need never new news next night noise north nose note nothing notice number object ocean
    offer office often oil old one open opinion orange order organ other out outside over own page pain paint pair
    paper parent park part party pass past path pattern pay peace people perhaps period person phone picture piece
    place plain plan plane plant plate play please point police poor popular position possible potato pound power
    practice prepare present president press pretty price print prison problem process produce product program promise
    protect prove public pull pure purpose push put quality quarter queen question quick quiet quite race radio rain
    raise range rate rather reach read ready real reason receive record red region relate remain remember repeat reply
    report rest result return rice rich ride right ring rise river road rock roll room root rope rose round row rule
    run safe sail salt same sand save scale school science score sea search season seat second secret section seed
    seem sell send sense sentence serve set settle seven several shade shape share sharp ship shoe shop short shoulder
    show side sight sign silver similar simple sing single sister size skill skin sky sleep slow small smell smile
    smoke smooth snow social soft soil soldier solution solve some son song soon sound south space speak special
    speech speed spend spirit spot spread spring square stage stand star start state station stay steel step still
    stone stop store storm story straight strange stream street strength stretch string strong student study subject
    such sudden sugar suggest summer sun supply support sure surface surprise swim system table tail take talk tall
    task taste tax teach team teacher tell ten term test than thank theory thick thin thing think third thought
    thousand thread three through throw time tiny tire today together tone tool top total touch toward town track
    trade train travel tree triangle trip trouble truck true trust try turn twenty type under unit until usual valley
    value various view village visit voice vote wait walk wall want war warm wash watch water wave way wear weather
    week weight west wheel white whole wide wife wild wind window wine wing winter wish with woman wonder wood word
    work world write wrong yard year yellow yes young
    """.split()  # noqa: SIM905 - a list of 853 quoted words would be no easier to read
)
