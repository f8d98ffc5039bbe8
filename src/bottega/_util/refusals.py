"""Replies that decline to answer."""

from __future__ import annotations

import re
import unicodedata

REFUSAL = re.compile(
    r"\W*(?:(?:i\W?(?:a)?m )?(?:so |very )?sorry\b.*|as an ai\b.*|unknown|unclear|n/a|no answer"
    r"|(?:i have )?no idea"
    r"|not sure|(?:i|we|it|this)?\s*(?:can ?not|can't|could not|couldn't"
    r"|(?:am |'m )?(?:unable|not able) to)\s+(?:\w+ )?(?:be )?(?:determined?|answer(?:ed)?|identify"
    r"|identified|tell|say|help|assist|provide|view|process|access|comply|recogni[sz]e"
    r"|see (?:the|an|any|this) (?:image|picture|photo))\b.*"
    r"|i (?:do not|don't) (?:know|have enough)\b.*|i(?: am|'m) not sure\b.*"
    r"|(?:there is )?(?:not enough|insufficient) information\b.*"
    r"|.{0,4}(?:我不知道|不知道|无法|抱歉|对不起).*"
    r"|(?:es tut mir leid|ich wei(?:ß|ss) (?:es )?nicht|je ne sais pas|désolé|no (?:lo )?sé"
    r"|lo siento)\b.*)\W*",
    re.IGNORECASE | re.DOTALL,
)
STILL_ANSWERS = re.compile(
    r"\b(?:probably|likely|looks like|answer is)\b|\bbut\b(?!.{0,12}(?:not|n't|unable)\b)", re.I
)
MAX_REFUSAL = 400
REQUEST = re.compile(
    r"\b(?:please|kindly|could you|can you|if you)\b[^.?!\n]{0,40}?\b(?:upload|provide|share"
    r"|attach|send|resend|supply|paste|insert)\b[^.?!\n]{0,40}?"
    r"\b(?:images?|pictures?|photo\w*|screenshots?)\b"
    r"|\b(?:no|not (?:see|find|have) an?y?|without an?y?) (?:image|picture|photo\w*)s?"
    r"(?: \w+){0,2} (?:provided|attached|uploaded|included|given|available)\b"
    r"|\b(?:don't|do not|can't|cannot) (?:actually )?(?:see|view|access|open) (?:\w+ )?"
    r"(?:images?|pictures?|photo\w*|attachments?)\b"
    r"|请.{0,6}(?:上传|提供|发送).{0,12}(?:图|照片)",
    re.IGNORECASE,
)
OPENING = re.compile(
    r"\A\W*(?:unfortunately|apologies|regrettably|hello|hi|sure|of course"
    r"|i(?:'d| would| am|'m) (?:be )?(?:happy|glad) to help[^.!?\n]{0,40})\b[,.!:]*\s*",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?。！？](?:\s|\Z)|\n")


def is_refusal(text: str) -> bool:
    """Return whether a text is empty or declines to answer."""
    if not text.strip():
        return True
    brief = text.strip()[:MAX_REFUSAL]
    refused = REFUSAL.fullmatch(unicodedata.normalize("NFKC", brief).replace("’", "'"))
    return refused is not None and not STILL_ANSWERS.search(brief)


def declines(reply: str) -> bool:
    """Return whether a reply refuses, also after "Unfortunately", or begins by asking for the
    image."""
    text = OPENING.sub("", reply[:MAX_REFUSAL].replace("’", "'"))
    asks = REQUEST.search(SENTENCE_END.split(text.strip(), maxsplit=1)[0])
    return is_refusal(text) or (asks is not None and not STILL_ANSWERS.search(text))
