"""Streams of documents in windows of one length: data=multidoc and data=megatron."""
