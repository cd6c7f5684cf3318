"""A padded batch cut to its own longest sequence."""

import pytest
import torch

import ops_math as om
from ops_nn.data import trim_to_longest


def padded(lengths, size):
    return (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    ("lengths", "multiple", "kept"),
    [((3, 70, 5), 64, 100), ((3, 60), 64, 64), ((3, 60), 8, 64), ((1, 2), 16, 16), ((0, 0), 16, 16), ((100, 1), 1, 100), ((9,), 1, 9)],
)
def test_everything_of_a_batch_is_cut_to_the_same_rounded_length(lengths, multiple, kept):
    mask = padded(lengths, 100)
    ids, square = torch.arange(mask.numel()).view(mask.shape), torch.rand(len(lengths), 1, 100, 100)
    flat = torch.rand(len(lengths), 1, 1, 100)
    cut = trim_to_longest(mask, ids, None, ids[..., None].expand(-1, -1, 3), square, flat, multiple=multiple)
    assert [None if t is None else tuple(t.shape) for t in cut] == [
        (len(lengths), kept), (len(lengths), kept), None, (len(lengths), kept, 3),
        (len(lengths), 1, kept, kept), (len(lengths), 1, 1, kept),
    ]  # fmt: skip
    for found, expected in ((cut[0], mask[:, :kept]), (cut[1], ids[:, :kept]), (cut[4], square[..., :kept, :kept])):
        assert torch.equal(found, expected)
    assert int(cut[0].sum()) == int(mask.sum()), "no real token is cut"
    assert torch.equal(trim_to_longest(mask, multiple=multiple), cut[0])


ONES = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(("mask", "others", "options", "sentence"), [
    (ONES[0], (), {}, "mask must be a tensor [B, S]; got shape [4]. Pass 1 at real tokens and 0 at padding."),
    (torch.tensor([[1, 1], [0, 1]]), (), {}, "mask must be true up to the length of each row and false after it; got another order "
     "in row 1. Pad on the right, or pack the documents with pack_documents."),
    (torch.zeros(2, 4), (), {}, "mask must be of truth values, or of integers 0 and 1; got one of torch.float32. Of a mask that is added "
     "to scores pass mask == 0."),
    (2 * ONES, (), {}, "mask must be of truth values, or of integers 0 and 1; got one of torch.int64 with other values. Of a mask that is "
     "added to scores pass mask == 0."),
    (ONES, (torch.ones(2, 5),), {}, "tensor 0 must be of shape [2, 4, ...], as mask is, or a mask [2, H, 4, 4]; got shape [2, 5]. "
     "Check that it comes from the same batch."),
    (ONES, (), {"multiple": 1.5}, "multiple must be a whole number of at least 1; got 1.5. Pass multiple=64, say."),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_words(mask, others, options, sentence):
    with pytest.raises(om.ArgumentError) as error:
        trim_to_longest(mask, *others, **options)
    assert str(error.value) == f"trim_to_longest: {sentence}"
