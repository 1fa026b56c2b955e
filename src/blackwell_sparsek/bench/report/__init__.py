"""The report: one self-contained HTML page, with plots as inline SVG."""
