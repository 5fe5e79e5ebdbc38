"""What was measured, judged or generated, as one page that needs nothing else."""

from foretoken.report.page import read, report

__all__ = ["read", "report"]
