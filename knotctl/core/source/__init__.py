"""Where bytes come from: one narrow interface over files and object stores."""
