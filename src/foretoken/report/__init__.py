"""What was measured, judged or generated, as one page that needs nothing else."""

from foretoken.report.reading import read
from foretoken.report.writing import report

__all__ = ["read", "report"]
