// Rows of nodes as one list, with the cache column of each node and the columns that it sees.

#pragma once

#include "abi.h"

#include <string.h>

#include <vector>

struct Listed {
  std::vector<int64_t> rows, columns, firsts, views;  // of nodes: row, column; of rows: first node, number of columns
  int64_t most, longest;                              // over all rows: most nodes, most columns

  void take(const Nodes& nodes) {
    rows.resize(nodes.count), columns.resize(nodes.count), firsts.resize(nodes.rows), views.resize(nodes.rows);
    most = longest = 0;
    for (int64_t row = 0, at = 0; row < nodes.rows; ++row) {
      const int64_t count = nodes.counts[row], end = nodes.lengths[row] + count;
      firsts[row] = at, views[row] = end;
      most = count > most ? count : most, longest = end > longest ? end : longest;
      for (int64_t node = 0; node < count; ++node, ++at) rows[at] = row, columns[at] = nodes.lengths[row] + node;
    }
  }
};

// Position of a node of a row, without its offset. Indices of new nodes follow those of earlier nodes.
static inline int64_t position_of(const Nodes& nodes, int64_t row, int64_t node) {
  return nodes.lengths[row] - nodes.earlier + nodes.depths[row * (nodes.earlier + nodes.width) + node];
}

static inline int64_t token_of(const Nodes& nodes, const Listed& listed, int64_t node) {
  const int64_t row = listed.rows[node];
  return nodes.tokens[row * nodes.width + node - listed.firsts[row]];
}

// Whether a new node sees the column of another node of its row.
static inline bool sees(const Nodes& nodes, int64_t row, int64_t node, int64_t other) {
  if (!nodes.ancestors) return other <= nodes.earlier + node;
  return nodes.ancestors[(row * nodes.width + node) * (nodes.earlier + nodes.width) + other];
}

static inline bool all_see_all(const Nodes& nodes, const Listed& listed, int64_t window) {
  const bool is_tree = nodes.ancestors && nodes.earlier;
  return listed.most == 1 && !is_tree && (!window || listed.longest <= window);
}

// Writes a mask (rows, most, longest) of `bytes` bytes per number, 0 for the columns that a node sees. `window` is the
// number of positions that a node looks back; 0 for all.
static inline void write_mask(const Nodes& nodes, const Listed& listed, int64_t window, int64_t bytes, char* mask) {
  memset(mask, 0xff, nodes.rows * listed.most * listed.longest * bytes);
  for (int64_t row = 0; row < nodes.rows; ++row)
    for (int64_t node = 0; node < nodes.counts[row]; ++node) {
      char* of_node = mask + (row * listed.most + node) * listed.longest * bytes;
      const int64_t start = nodes.lengths[row] - nodes.earlier;
      const int64_t hidden = window ? position_of(nodes, row, nodes.earlier + node) - window + 1 : 0;
      const int64_t first = hidden < 0 ? 0 : hidden < start ? hidden : start;  // positions before this one are hidden
      memset(of_node + first * bytes, 0, (start - first) * bytes);
      for (int64_t other = 0; other < nodes.earlier + nodes.counts[row]; ++other)
        if (sees(nodes, row, node, other) && position_of(nodes, row, other) >= hidden)
          memset(of_node + (start + other) * bytes, 0, bytes);
    }
}
