"""From a text to token numbers: words or byte pairs of the training text, the same in every process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING = "[PAD]"
UNKNOWN = "[UNK]"
TOKENS = ("auto", "words", "pairs")
_USUAL_SIZE = {"words": 30_000, "pairs": 8000}
_NUM_BYTES = 256
_FEWEST_WORDS = 3
_MOST_UNKNOWN = 0.2
_TEXTS_LOOKED_AT = 20_000
_LONGEST_BY_DEFAULT = 128
_LENGTH_STEP = 8
_TEXTS_AT_ONCE = 1024


class TextEncoder:
    """A tokenizer and the length that texts are cut or filled to.

    Texts are brought to NFKC and lower case and parted into words and marks. Either those of the training text are the
    tokens, the most frequent ones if there are too many, and others are unknown; or a word is written in bytes, of
    which the pairs that are frequent in the training text became tokens: so every text has tokens, whatever its script.

    Args:
        tokenizer: Of the library ``tokenizers``; token 0 is padding.
        max_length: Tokens of a sample; what is beyond is dropped.

    Source: Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", ACL 2016; on
    bytes as in Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    @classmethod
    def learn(
        cls, texts: Sequence[str], *, vocabulary_size: int | None, max_length: int | None, tokens: str = "auto"
    ) -> TextEncoder:
        """Learn tokens from the training texts.

        Args:
            texts: At least one.
            vocabulary_size: At most so many tokens; small texts may give fewer. None for 30,000 words or 8,000 pairs.
            tokens: ``words``, ``pairs``, or ``auto``: words where at most a fifth of the words of further texts will be
                unknown, which is about the share of words that the training texts have once (Good, "The Population
                Frequencies of Species", Biometrika 1953); so not where words are not parted by spaces.
            max_length: None for the longest training text in tokens, up to 128, rounded up to a multiple of 8.

        Raises:
            ImportError: the library is not installed.
            ValueError: there are no such tokens; a vocabulary too small for padding, unknown and a word, or the 256
                bytes; or a length below 1.
        """
        library = _library()
        if tokens not in TOKENS:
            raise ValueError(f"tokens {tokens!r} are not known; choose one of {', '.join(TOKENS)}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"a length of {max_length} tokens; it is at least 1")
        if tokens == "auto":
            tokens = "words" if _share_of_rare_words(library, texts) <= _MOST_UNKNOWN else "pairs"
        size = _USUAL_SIZE[tokens] if vocabulary_size is None else vocabulary_size
        tokenizer, trainer = (_words if tokens == "words" else _pairs)(library, size)
        tokenizer.normalizer = _normalizer(library)
        tokenizer.train_from_iterator(texts, trainer)
        if max_length is None:
            longest = max(map(len, _token_ids(tokenizer, texts)))
            max_length = min(_LONGEST_BY_DEFAULT, -(-max(longest, 1) // _LENGTH_STEP) * _LENGTH_STEP)
        return cls(tokenizer, max_length)

    @property
    def vocabulary_size(self) -> int:
        """Token numbers are below it."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> Tensor:
        """``(n, max_length)`` int32 token numbers, 0 behind the end of a text; at least one is not 0."""
        unknown = [int(self.tokenizer.token_to_id(UNKNOWN) or 0)]
        ids = np.zeros((len(texts), self.max_length), dtype=np.int32)
        for row, found in enumerate(_token_ids(self.tokenizer, texts)):
            kept = found[: self.max_length] or unknown
            ids[row, : len(kept)] = kept
        return torch.from_numpy(ids)

    def to_json(self) -> dict[str, Any]:
        """Everything that `from_json` needs, as plain values."""
        return {"max_length": self.max_length, "tokenizer": json.loads(self.tokenizer.to_str())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TextEncoder:
        """The encoder that `to_json` described.

        Raises:
            ImportError: the library is not installed.
            ValueError: it describes none.
        """
        library = _library()
        try:
            tokenizer, max_length = library.Tokenizer.from_str(json.dumps(content["tokenizer"])), content["max_length"]
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"this describes no tokenizer of nuGNN ({str(error)[:200]})") from error
        if tokenizer.token_to_id(PADDING) != 0 or tokenizer.token_to_id(UNKNOWN) != 1:
            raise ValueError(f"this is no tokenizer of nuGNN: {PADDING} has to be token 0 and {UNKNOWN} token 1")
        if not isinstance(max_length, int) or max_length < 1:
            raise ValueError(f"a length of {max_length!r} tokens; it is a whole number from 1")
        return cls(tokenizer, max_length)

    def __getstate__(self) -> dict[str, Any]:
        return self.to_json()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= vars(TextEncoder.from_json(state))


def _words(library: Any, vocabulary_size: int) -> tuple[Tokenizer, Any]:
    if vocabulary_size < _FEWEST_WORDS:
        raise ValueError(f"a vocabulary of {vocabulary_size} tokens; it holds padding, unknown and a word at least")
    tokenizer = library.Tokenizer(library.models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    return tokenizer, library.trainers.WordLevelTrainer(
        vocab_size=vocabulary_size, special_tokens=[PADDING, UNKNOWN], show_progress=False
    )


def _pairs(library: Any, vocabulary_size: int) -> tuple[Tokenizer, Any]:
    if vocabulary_size < _NUM_BYTES + 2:
        raise ValueError(
            f"a vocabulary of {vocabulary_size} tokens; it holds padding, unknown and the {_NUM_BYTES} bytes at "
            f"least, so give {_NUM_BYTES + 2} or more"
        )
    tokenizer = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer, library.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PADDING, UNKNOWN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )


def _normalizer(library: Any) -> Any:
    return library.normalizers.Sequence([library.normalizers.NFKC(), library.normalizers.Lowercase()])


def _share_of_rare_words(library: Any, texts: Sequence[str]) -> float:
    """Part of the words of ``texts`` that are there once; of many texts, the first are looked at."""
    normalizer, parted = _normalizer(library), library.pre_tokenizers.Whitespace()
    counts: Counter[str] = Counter()
    for text in texts[:_TEXTS_LOOKED_AT]:
        counts.update(word for word, _ in parted.pre_tokenize_str(normalizer.normalize_str(text)))
    return sum(count == 1 for count in counts.values()) / max(1, counts.total())


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        encodings = tokenizer.encode_batch_fast(list(texts[first : first + _TEXTS_AT_ONCE]))
        yield from (encoding.ids for encoding in encodings)


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: F401  # attributes of it
    except ImportError:
        raise ImportError("data sets of text need the library tokenizers: pip install 'nugnn[text]'") from None
    return tokenizers
