"""The report: one HTML page that needs no network, with plots as inline SVG."""
