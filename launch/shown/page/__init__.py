"""One self-contained HTML page: timelines that zoom and can be searched, and tables that sort."""
