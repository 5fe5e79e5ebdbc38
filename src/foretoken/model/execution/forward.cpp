// All layers of a model over the few nodes of a step in one call: inputs are gathered, masks made and layers replayed.

#include "replay.h"

#include <string.h>
#include <vector>

namespace {

struct Form {      // layers that run attention alike
  Attention call;  // but for what changes with the nodes and the cache
  int64_t window;  // positions that a node looks back, its own included; 0 for all
  int64_t item;    // bytes of a number
};

struct Layer {
  const Step* steps;
  int64_t num_steps;
  char* const* pointers;  // of which some are put in here
  int64_t num_pointers, form;  // -1 without attention
  const int64_t* inputs;       // which of the inputs it is given beside hidden states
  int64_t num_inputs;
};

struct Table {  // of an input: a row for every token, or for every position; null for what is given
  const char* rows;
  int64_t bytes, count, by_position;
};

struct Forward {
  int64_t num_layers, num_forms, num_inputs, state_bytes, working_bytes;  // state_bytes: of a node
  const Layer* layers;
  const Form* forms;
};

struct Tail {  // what comes behind the layers, where that is a norm and a product
  const Norm* norm;
  const Matrix* output;
  char *read, *logits;  // (nodes, state_bytes) and (nodes, V)
};

struct Store {  // of a cache
  void *const *keys, *const *values;  // of every layer: (rows, heads, columns, size)
  int64_t columns;
};

struct Fed {  // rows of nodes, padded to one width; those of a row lie behind its committed columns
  int64_t rows, width, nodes;         // nodes: without padding
  int64_t earlier;                    // committed columns, the last ones of every row, that are nodes of the same trees
  const int64_t *tokens, *depths;     // (rows, width), and (rows, earlier + width) from the root
  const int64_t *counts, *lengths;    // of every row: nodes, and committed columns
  const int64_t* offsets;             // how far its positions are ahead of its columns; null for nowhere
  const uint8_t* ancestors;           // (rows, width, earlier + width); null where rows are chains
  int64_t first_row;                  // of the cache
};

enum { DONE = 0, OUT_OF_RANGE = -1 };

extern "C" int64_t foretoken_attention_scratch(const Attention* call, int threads);

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Place {  // memory that grows with what is asked for
  std::vector<char> bytes;
  char* of(int64_t size) {
    if ((int64_t)bytes.size() < size + 64) bytes.resize(size + 64);
    return (char*)(((uintptr_t)bytes.data() + 63) / 64 * 64);
  }
};

struct Work {
  std::vector<int64_t> rows, columns, firsts, views;
  std::vector<Attention> calls;
  std::vector<Group> groups;
  std::vector<Rows> of_forms;
  std::vector<Place> masks;
  std::vector<char*> given, pointers;
  Place arena, scratch, inputs, wide;
};

// Whether a node sees the column of another one of its row; numbers of others begin with the earlier ones.
bool sees(const Fed& fed, int64_t row, int64_t node, int64_t other) {
  if (!fed.ancestors) return other <= fed.earlier + node;
  return fed.ancestors[(row * fed.width + node) * (fed.earlier + fed.width) + other];
}

// Of an earlier or a new node, where offsets are left out.
int64_t position(const Fed& fed, int64_t row, int64_t other) {
  return fed.lengths[row] - fed.earlier + fed.depths[row * (fed.earlier + fed.width) + other];
}

// Which columns every node sees, (rows, most, longest), 0 for those; null where all see all.
const void* mask_of(const Fed& fed, const Form& form, int64_t most, int64_t longest, Place& place) {
  const bool is_tree = fed.ancestors && fed.earlier;
  if (most == 1 && !is_tree && (!form.window || longest <= form.window)) return nullptr;
  char* mask = place.of(fed.rows * most * longest * form.item);
  memset(mask, 0xff, fed.rows * most * longest * form.item);
  for (int64_t row = 0; row < fed.rows; ++row)
    for (int64_t node = 0; node < fed.counts[row]; ++node) {
      char* of_node = mask + (row * most + node) * longest * form.item;
      const int64_t start = fed.lengths[row] - fed.earlier;
      const int64_t hidden = form.window ? position(fed, row, fed.earlier + node) - form.window + 1 : 0;
      const int64_t first = hidden < 0 ? 0 : hidden < start ? hidden : start;  // positions before this one are not seen
      memset(of_node + first * form.item, 0, (start - first) * form.item);
      for (int64_t other = 0; other < fed.earlier + fed.counts[row]; ++other)
        if (sees(fed, row, node, other) && position(fed, row, other) >= hidden)
          memset(of_node + (start + other) * form.item, 0, form.item);
    }
  return mask;
}

// The rows of a table that nodes have, (nodes, bytes); false for one that there is not.
bool gather(const Fed& fed, const Table& table, char* out) {
  for (int64_t row = 0; row < fed.rows; ++row)
    for (int64_t node = 0; node < fed.counts[row]; ++node, out += table.bytes) {
      const int64_t place = position(fed, row, fed.earlier + node) + (fed.offsets ? fed.offsets[row] : 0);
      const int64_t index = table.by_position ? place : fed.tokens[row * fed.width + node];
      if (index < 0 || index >= table.count) return false;
      memcpy(out, table.rows + index * table.bytes, table.bytes);
    }
  return true;
}

void list(const Fed& fed, Work& work, int64_t& most, int64_t& longest) {
  work.rows.resize(fed.nodes), work.columns.resize(fed.nodes);
  work.firsts.resize(fed.rows), work.views.resize(fed.rows);
  most = longest = 0;
  for (int64_t row = 0, at = 0; row < fed.rows; ++row) {
    const int64_t count = fed.counts[row], end = fed.lengths[row] + count;
    work.firsts[row] = at, work.views[row] = end;
    most = count > most ? count : most, longest = end > longest ? end : longest;
    for (int64_t node = 0; node < count; ++node, ++at)
      work.rows[at] = row, work.columns[at] = fed.lengths[row] + node;
  }
}

void finish(const Tail& tail, int64_t nodes, const char* states, Place& place, int threads) {
  foretoken_norm(tail.norm, states, nodes, tail.read);
  const Matrix& matrix = *tail.output;
  const int64_t inputs = whole_lines(nodes * matrix.inputs * sizeof(float));
  const bool is_wide = matrix.kind != PAIRS && tail.norm->kind != FLOAT32;
  char* wide = is_wide ? place.of(inputs + nodes * matrix.outputs * sizeof(float)) : nullptr;
  const int64_t operands[] = {(int64_t)tail.output, (int64_t)tail.read,     nodes,          (int64_t)tail.logits,
                              is_wide ? tail.norm->kind : 0, (int64_t)wide, (int64_t)(wide + inputs)};
  multiply(operands, threads);
}

}  // namespace

// Of all layers, outputs (layers, nodes, state_bytes); hidden states before them go to `first`.
// Inputs that no table has are given; what comes behind the layers is left out where there is no tail.
extern "C" int64_t foretoken_forward(const Forward* model, const Table* tables, const Store* store, const Fed* fed,
                                     void* const* given, char* first, char* outputs, const Tail* tail, int threads) {
  static thread_local Work work;
  int64_t most, longest, scratch = 0, size = 0;
  list(*fed, work, most, longest);
  work.given.resize(model->num_inputs);
  for (int64_t i = 1; i < model->num_inputs; ++i) size += whole_lines(fed->nodes * tables[i].bytes);
  char* place = work.inputs.of(size);
  for (int64_t i = 0; i < model->num_inputs; ++i) {
    work.given[i] = !tables[i].rows ? (char*)given[i] : i ? place : first;
    if (tables[i].rows && !gather(*fed, tables[i], work.given[i])) return OUT_OF_RANGE;
    if (i) place += whole_lines(fed->nodes * tables[i].bytes);
  }
  const int64_t forms = model->num_forms;
  work.calls.resize(forms), work.groups.resize(forms), work.of_forms.resize(forms);
  if ((int64_t)work.masks.size() < forms) work.masks.resize(forms);
  for (int64_t i = 0; i < forms; ++i) {
    const Form& form = model->forms[i];
    Attention& call = work.calls[i] = form.call;
    call.rows = fed->rows, call.counts = fed->counts;
    call.firsts = work.firsts.data(), call.columns = work.views.data();
    call.mask_row = most * longest, call.mask_node = longest;
    call.key_head = store->columns * call.size, call.key_row = call.heads * call.key_head;
    call.value_head = store->columns * call.value_size, call.value_row = call.heads * call.value_head;
    const int64_t needed = foretoken_attention_scratch(&call, threads);
    scratch = needed > scratch ? needed : scratch;
    work.groups[i] = {&call, mask_of(*fed, form, most, longest, work.masks[i]), 0, 0};
    work.of_forms[i] = {fed->nodes, work.rows.data(), work.columns.data(), call.key_row, call.key_head,
                        call.value_row, call.value_head, 1, &work.groups[i]};
  }
  char *arena = work.arena.of(model->working_bytes), *room = work.scratch.of(scratch * sizeof(float));
  char* states = work.given[0];
  for (int64_t index = 0; index < model->num_layers; ++index) {
    const Layer& layer = model->layers[index];
    work.pointers.assign(layer.pointers, layer.pointers + layer.num_pointers);
    char** pointers = work.pointers.data();
    pointers[ARENA] = arena, pointers[SCRATCH] = room, pointers[OUT] = outputs;
    if (layer.form >= 0) {
      const Attention& call = work.calls[layer.form];
      const int64_t item = model->forms[layer.form].item;
      pointers[KEYS] = (char*)store->keys[index] + fed->first_row * call.key_row * item;
      pointers[VALUES] = (char*)store->values[index] + fed->first_row * call.value_row * item;
    }
    pointers[INPUTS] = states;
    for (int64_t i = 0; i < layer.num_inputs; ++i) pointers[INPUTS + 1 + i] = work.given[layer.inputs[i]];
    const Part part = {layer.steps, layer.num_steps, pointers, layer.form < 0 ? nullptr : &work.of_forms[layer.form]};
    foretoken_replay(&part, 1, threads);
    states = outputs, outputs += fed->nodes * model->state_bytes;
  }
  if (tail) finish(*tail, fed->nodes, states, work.wide, threads);
  return DONE;
}
