"""The container: layout, reader, writer, verify."""
