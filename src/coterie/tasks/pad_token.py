"""One pad token for model and tokenizer: decoders that label texts read the last token of a row that is no pad."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.tasks.tokenizer import LoadedTokenizer

LABELLING_CLASS = "AutoModelForSequenceClassification"
"""The auto class of such models. Others never look for pads: padding is masked by position."""


def agree_on_pad(tokenizer: "LoadedTokenizer", pad_token_id: int | None) -> dict[str, object]:
    """Make the tokenizer pad by the model's pad token, or say how the model's config is to follow the tokenizer.

    The tokenizer's notes tell the user, and both are saved with the model.

    Args:
        tokenizer: The model's; its pad token may be changed.
        pad_token_id: The pad token in the model's config; None or negative if it has none.

    Returns:
        Config values to set.
    """
    if pad_token_id == tokenizer.pad_token_id:
        return {}
    token = None
    if pad_token_id is not None and pad_token_id >= 0:
        token = tokenizer.hf.convert_ids_to_tokens(pad_token_id)
    if token is None:
        note = (
            f"the model's config has no pad token: {tokenizer.hf.pad_token!r} ({tokenizer.pad_token_id}) is set and "
            "saved with it, since the model reads each row's last token before the pads"
        )
        tokenizer.notes += (note,)
        return {"pad_token_id": tokenizer.pad_token_id}
    tokenizer.notes += (
        f"the tokenizer pads by {tokenizer.hf.pad_token!r}, the model's config says {token!r}, which is used and saved",
    )
    tokenizer.hf.pad_token = token
    tokenizer.pad_token_id = int(pad_token_id or 0)
    return {}
