"""The checks of all topics, so that processes start once for them."""

from . import attention_checks, decode_checks, huggingface_checks, linear_checks

CHECKS = {
    **attention_checks.CHECKS,
    **decode_checks.CHECKS,
    **linear_checks.CHECKS,
    **huggingface_checks.CHECKS,
}
