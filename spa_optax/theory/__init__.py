"""The audit of a schedule by the theory of the paper, arXiv:2010.00406."""

from ._audit import Audit, audit, audit_sgdm

__all__ = ["Audit", "audit", "audit_sgdm"]
