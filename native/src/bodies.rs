//! Reads the fields of captured bodies into columns: a value for each body, a row for each topic-partition, and the
//! headers of the record batches.
//!
//! A program is a list of numbers that `kproxy/capture/columns/programs.py` makes from Kafka's layouts. A body that does
//! not fit it is read by the Python session: one with tagged fields, message sets, cut batches, or an error inside.

use std::collections::HashMap;

use crate::program::{EACH, FIXED, MAYBE, SKIP, TEXT, ZERO};
use crate::rope::Rope;

/// The operations that these programs have in addition, each followed by its operands.
pub const NUMBER: u32 = 14; // value, bytes: a signed integer
pub const FINE: u32 = 15; // value, bytes: the same, and it must be 0
pub const NAME: u32 = 16; // text, width of the length (0: compact), whether null is allowed
pub const ID: u32 = 17; // text, bytes
pub const ROW: u32 = 18; // operations of the body: a topic-partition
pub const BATCHES: u32 = 19; // width, whether null is allowed, whether headers are kept: record batches of a topic-partition
pub const TAGGED: u32 = 20; // operations of what follows: a tag section; each read field is TAG and its operations
pub const TAG: u32 = 21; // tag, operations of the field

/// The values, in this order (`VALUES` of kproxy/capture/columns/programs.py): columns of rows, then of the body.
pub const COLUMNS: usize = 15;
pub const VALUES: usize = COLUMNS + 3;
const BYTES: usize = 2;
const BATCH_COUNT: usize = 3;
const RECORDS: usize = 4;
const CODECS: usize = 5;
const MAGIC: usize = 6;
const FIRST_OFFSET: usize = 12;
const LAST_OFFSET: usize = 13;
const MAX_TIMESTAMP: usize = 14;
pub const THROTTLE_MS: usize = COLUMNS;
pub const ERROR_CODE: usize = COLUMNS + 1;
pub const REPLICA_ID: usize = COLUMNS + 2;

/// The texts.
pub const TEXTS: usize = 5;
const TOPIC: usize = 0;
const TOPIC_ID: usize = 1;
const GROUP_ID: usize = 2;
const METADATA: usize = 3;
const RACK_ID: usize = 4;

pub const NULL: i64 = i64::MIN; // no number; -1 is one
const MOST_TEXT: usize = 0x7fff; // as MAX_TEXT of kproxy/wire/bodies/plans.py
/// The most topic-partitions of a body, and the most batches: the session, which bounds those of all pending requests, reads
/// larger ones.
const MOST_ROWS: usize = 4096;
const BATCH_HEADER: usize = 61; // of magic 2
const BATCH_START: usize = 12; // base offset and length, which the length does not count
const CONTROL: u16 = 0x20;

type Text = Option<Vec<u8>>;

/// Distinct values by the order of their arrival.
#[derive(Default)]
pub struct Distinct<T> {
    pub values: Vec<T>,
    places: HashMap<T, i64>,
}

impl<T: Clone + Eq + std::hash::Hash> Distinct<T> {
    fn place(&mut self, value: &T) -> i64 {
        if let Some(place) = self.places.get(value) {
            return *place;
        }
        let place = self.values.len() as i64;
        self.values.push(value.clone());
        self.places.insert(value.clone(), place);
        place
    }
}

/// The rows of the topic-partitions of many bodies.
#[derive(Default)]
pub struct Bodies {
    pub of: Vec<i64>, // the body of each row
    pub topics: Distinct<(Text, Text)>,
    pub topic: Vec<i64>,
    pub numbers: [Vec<i64>; COLUMNS],
    pub words: Distinct<Text>, // group ids and metadata
    pub group_id: Vec<i64>,
    pub metadata: Vec<i64>,
    pub batch_of: Vec<i64>, // the row of each batch
    pub batches: Vec<u8>,   // headers
}

impl Bodies {
    /// The end of the rows, for `truncate`.
    pub fn mark(&self) -> (usize, usize) {
        (self.of.len(), self.batch_of.len())
    }

    pub fn truncate(&mut self, mark: (usize, usize)) {
        let (rows, batches) = mark;
        for column in [&mut self.of, &mut self.topic, &mut self.group_id, &mut self.metadata] {
            column.truncate(rows);
        }
        for column in &mut self.numbers {
            column.truncate(rows);
        }
        self.batch_of.truncate(batches);
        self.batches.truncate(batches * BATCH_HEADER);
    }

    /// The topics of the rows since a mark that have records.
    pub fn topics_with_records(&self, mark: (usize, usize)) -> impl Iterator<Item = usize> + '_ {
        let rows = self.topic[mark.0..].iter().zip(&self.numbers[BYTES][mark.0..]);
        rows.filter(|(_, bytes)| **bytes > 0).map(|(topic, _)| *topic as usize)
    }
}

/// The values that were read last.
#[derive(Clone)]
pub struct Found {
    pub numbers: [i64; VALUES],
    pub texts: [Text; TEXTS],
}

impl Found {
    pub fn has_rack(&self) -> bool {
        self.texts[RACK_ID].as_ref().map_or(false, |rack| !rack.is_empty())
    }
}

const fn blank() -> [i64; VALUES] {
    let mut numbers = [-1; VALUES];
    numbers[0] = NULL; // the error code of a topic-partition
    numbers[BYTES] = 0;
    numbers[BATCH_COUNT] = 0;
    numbers[RECORDS] = 0;
    numbers[CODECS] = 0;
    numbers[ERROR_CODE] = NULL;
    numbers
}

const BLANK: [i64; VALUES] = blank();

struct Reader<'a, 'b> {
    rope: Rope<'a>,
    found: Found,
    bodies: &'b mut Bodies,
    body: i64,
    rows_left: usize,
    batches_left: usize,
    topic: Option<i64>, // the place of the topic in `found`, if it was looked for
    words: [i64; 2],    // the places of the group id and of the metadata; -1: null
}

/// Reads a body behind its correlation id; None: it does not fit, and the rows must be truncated.
pub fn read(program: &[u32], rope: Rope<'_>, bodies: &mut Bodies, body: i64) -> Option<Found> {
    let found = Found { numbers: BLANK, texts: Default::default() };
    let (rows_left, batches_left) = (MOST_ROWS, MOST_ROWS);
    let mut reader = Reader { rope, found, bodies, body, rows_left, batches_left, topic: None, words: [-1; 2] };
    reader.run(program)?;
    Some(reader.found)
}

impl Reader<'_, '_> {
    /// A length or count that may be null only where that is allowed: then 0.
    fn count(&mut self, width: u32, may_be_null: u32) -> Option<usize> {
        match self.rope.length(width)? {
            Some(count) => Some(count),
            None => (may_be_null != 0).then(|| 0),
        }
    }

    fn run(&mut self, program: &[u32]) -> Option<()> {
        let mut at = 0;
        while at < program.len() {
            let operands = &program[at + 1..];
            at += match program[at] {
                SKIP => {
                    self.rope.skip(operands[0] as usize)?;
                    2
                }
                ZERO => {
                    for _ in 0..operands[0] {
                        if self.rope.byte()? != 0 {
                            return None;
                        }
                    }
                    2
                }
                TEXT => {
                    let length = self.count(operands[0], operands[1])?;
                    self.rope.skip(length)?;
                    3
                }
                FIXED => {
                    let count = self.count(operands[0], operands[1])?;
                    self.rope.skip(count.checked_mul(operands[2] as usize)?)?;
                    4
                }
                EACH => {
                    let body = &operands[4..4 + operands[3] as usize];
                    let count = self.count(operands[0], operands[1])?;
                    if count.checked_mul(operands[2] as usize)? > self.rope.left() {
                        return None;
                    }
                    for _ in 0..count {
                        self.run(body)?;
                    }
                    5 + body.len()
                }
                MAYBE => {
                    let body = &operands[2..2 + operands[1] as usize];
                    if self.rope.number(1)? >= i64::from(operands[0] as i32) {
                        self.run(body)?;
                    }
                    3 + body.len()
                }
                operation @ (NUMBER | FINE) => {
                    let number = self.rope.number(operands[1] as usize)?;
                    if operation == FINE && number != 0 {
                        return None;
                    }
                    self.found.numbers[operands[0] as usize] = number;
                    3
                }
                NAME => {
                    let length = self.rope.length(operands[1])?;
                    if length.is_none() && operands[2] == 0 {
                        return None;
                    }
                    self.text(operands[0] as usize, length)?;
                    4
                }
                ID => {
                    self.text(operands[0] as usize, Some(operands[1] as usize))?;
                    3
                }
                ROW => {
                    let body = &operands[1..1 + operands[0] as usize];
                    self.row(body)?;
                    2 + body.len()
                }
                BATCHES => {
                    let size = self.count(operands[0], operands[1])?;
                    self.batches(size, operands[2] != 0)?;
                    4
                }
                TAGGED => {
                    let fields = &operands[1..1 + operands[0] as usize];
                    self.tagged(fields)?;
                    2 + fields.len()
                }
                _ => return None,
            };
        }
        Some(())
    }

    /// A tag section: known fields have the size that is stated, and others are skipped.
    fn tagged(&mut self, fields: &[u32]) -> Option<()> {
        let mut least = 0;
        for _ in 0..self.rope.uvarint()? {
            let tag = self.rope.uvarint()?;
            let size = self.rope.uvarint()? as usize;
            if tag < least {
                return None;
            }
            least = tag.checked_add(1)?;
            let end = self.rope.left().checked_sub(size)?;
            match field(fields, tag) {
                None => self.rope.skip(size)?,
                Some(program) => self.run(program)?,
            }
            if self.rope.left() != end {
                return None;
            }
        }
        Some(())
    }

    fn text(&mut self, text: usize, length: Option<usize>) -> Option<()> {
        if text <= TOPIC_ID {
            self.topic = None;
        }
        let kept = &mut self.found.texts[text];
        match length {
            None => *kept = None,
            Some(length) if length > MOST_TEXT => return None,
            Some(length) => {
                let bytes = kept.get_or_insert_with(Vec::new);
                bytes.resize(length, 0);
                self.rope.fill(bytes)?;
            }
        }
        if text == GROUP_ID || text == METADATA {
            self.words[text - GROUP_ID] = if kept.is_none() { -1 } else { self.bodies.words.place(kept) };
        }
        Some(())
    }

    /// A topic-partition: what is read in it is forgotten behind it.
    fn row(&mut self, body: &[u32]) -> Option<()> {
        self.rows_left = self.rows_left.checked_sub(1)?;
        let before = (self.found.numbers, self.words);
        self.run(body)?;
        let row = self.bodies.of.len() as i64;
        let topic = match self.topic {
            Some(topic) => topic,
            None => {
                let texts = &self.found.texts;
                self.bodies.topics.place(&(texts[TOPIC].clone(), texts[TOPIC_ID].clone()))
            }
        };
        self.topic = Some(topic);
        let bodies = &mut *self.bodies;
        bodies.of.push(self.body);
        bodies.topic.push(topic);
        for (column, number) in bodies.numbers.iter_mut().zip(self.found.numbers) {
            column.push(number);
        }
        bodies.group_id.push(self.words[0]);
        bodies.metadata.push(self.words[1]);
        let batches = bodies.batches.len() / BATCH_HEADER;
        bodies.batch_of.resize(batches, row);
        (self.found.numbers, self.words) = before;
        Some(())
    }

    /// Complete batches of magic 2; all other records are Python's. Their records are skipped.
    fn batches(&mut self, size: usize, keeps_headers: bool) -> Option<()> {
        let numbers = &mut self.found.numbers;
        numbers[BYTES] = size as i64;
        let mut left = size;
        while left > 0 {
            let mut header = [0; BATCH_HEADER];
            left.checked_sub(BATCH_HEADER)?;
            self.batches_left = self.batches_left.checked_sub(1)?;
            self.rope.fill(&mut header)?;
            let i32_at = |at: usize| i32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let i64_at = |at: usize| i64::from_be_bytes(header[at..at + 8].try_into().unwrap());
            let attributes = u16::from_be_bytes([header[21], header[22]]);
            let whole = usize::try_from(i32_at(8)).ok()?.checked_add(BATCH_START)?;
            let count = i64::from(i32_at(57));
            if header[16] != 2 || count < 0 || whole < BATCH_HEADER || whole > left {
                return None;
            }
            self.rope.skip(whole - BATCH_HEADER)?;
            left -= whole;
            let base = i64_at(0);
            if numbers[BATCH_COUNT] == 0 {
                numbers[FIRST_OFFSET] = base;
            }
            numbers[BATCH_COUNT] += 1;
            numbers[MAGIC] = 2;
            numbers[CODECS] |= 1 << (attributes & 7);
            numbers[LAST_OFFSET] = base.wrapping_add(i64::from(i32_at(23)));
            numbers[MAX_TIMESTAMP] = numbers[MAX_TIMESTAMP].max(i64_at(35));
            if attributes & CONTROL == 0 {
                numbers[RECORDS] += count;
            }
            if keeps_headers {
                self.bodies.batches.extend_from_slice(&header);
            }
        }
        Some(())
    }
}

/// The operations of a tagged field.
fn field(fields: &[u32], tag: u32) -> Option<&[u32]> {
    let mut at = 0;
    while at < fields.len() {
        let end = at + 3 + fields[at + 2] as usize;
        if fields[at + 1] == tag {
            return Some(&fields[at + 3..end]);
        }
        at = end;
    }
    None
}

/// Checks a program before its first use, so that running it never reads beyond it: each operation is known and whole.
pub fn is_sound(program: &[u32]) -> bool {
    is_sound_section(program, false)
}

/// is_of_tags: it consists of the fields of a tag section.
fn is_sound_section(program: &[u32], is_of_tags: bool) -> bool {
    let mut at = 0;
    while at < program.len() {
        let operands = &program[at + 1..];
        let (fixed, body) = match program[at] {
            SKIP | ZERO => (1, 0),
            TEXT | NUMBER | FINE | ID => (2, 0),
            FIXED | NAME | BATCHES => (3, 0),
            EACH => (4, operands.get(3).copied().unwrap_or(0) as usize),
            MAYBE => (2, operands.get(1).copied().unwrap_or(0) as usize),
            ROW | TAGGED => (1, operands.first().copied().unwrap_or(0) as usize),
            TAG => (2, operands.get(1).copied().unwrap_or(0) as usize),
            _ => return false,
        };
        if operands.len() < fixed || operands.len() - fixed < body {
            return false;
        }
        let is_known = match program[at] {
            NUMBER | FINE => (operands[0] as usize) < VALUES && matches!(operands[1], 1 | 2 | 4 | 8),
            NAME | ID => (operands[0] as usize) < TEXTS,
            // An element of no bytes would let a count of 2^31 loop without reading anything.
            EACH => operands[2] > 0,
            _ => true,
        };
        let body = &operands[fixed..fixed + body];
        if !is_known || is_of_tags != (program[at] == TAG) || !is_sound_section(body, program[at] == TAGGED) {
            return false;
        }
        at += 1 + fixed + body.len();
    }
    true
}
