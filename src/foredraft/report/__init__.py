"""What was measured, judged or generated, as one page that needs nothing else, or its charts as a picture."""

from foredraft.report.page import read, report, sections

__all__ = ["read", "report", "sections"]
