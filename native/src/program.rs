//! Checks that a response is plain: well-formed, without throttle time, error or broker address. And collects what is in a
//! Produce: names, from which a policy's decision follows, and the records of each topic-partition with their offsets.
//!
//! A program is a list of numbers that `kproxy/protocol/programs.py` makes from Kafka's layouts. Everything that does not
//! fit it is read by the Python session, as is a frame that takes too long.

/// The operations, each followed by its operands.
pub const SKIP: u32 = 1; // bytes: skip them
pub const ZERO: u32 = 2; // bytes: each of them must be 0
pub const TEXT: u32 = 3; // width of the length (0: compact), whether null is allowed: skip the content
pub const FIXED: u32 = 4; // width of the count, whether null is allowed, bytes of an element: skip an array
pub const EACH: u32 = 5; // width, whether null is allowed, least bytes of an element, operations of the body
pub const EMPTY: u32 = 6; // width, whether null is allowed: an array that must be empty
pub const MAYBE: u32 = 7; // least marker, operations of the body: a struct that may be null
pub const TAGS: u32 = 8; // count, tags: a tag section; a listed tag must not be present
pub const NAME: u32 = 9; // width, whether null is allowed: a name; collect it, with its length before it
pub const ID: u32 = 10; // bytes: an id; collect it
pub const PARTITION: u32 = 11; // the next four bytes are the partition's index in the topic that was collected last
pub const RECORDS: u32 = 12; // width, whether null is allowed: the partition's record batches; add them up
pub const OFFSET: u32 = 13; // the next eight bytes are the offset of the partition's first record

/// The most operations for one frame, about 0.2 ms: other connections wait meanwhile.
const MOST_OPERATIONS: u32 = 20_000;
/// The most bytes of names in a frame, and the most topic-partitions with records (MAX_UNCOUNTED of wire/state.py).
pub const MAX_NAMES: usize = 512;
pub const MAX_PARTITIONS: usize = 16;

const BATCH_HEADER: usize = 61; // of magic 2
const BATCH_START: usize = 12; // base offset and length, which the length does not count
const CONTROL: u16 = 0x20;

/// A topic-partition of a Produce: the sums of its record batches in a request, the first offset in a response.
#[derive(Clone)]
pub struct Partition {
    pub topic: (usize, usize), // in the names: the content alone
    pub index: i32,
    pub bytes: i64,
    pub batches: i64,
    pub records: i64,
    pub codecs: i64, // bits
    pub offset: i64,
}

/// What a program collects.
#[derive(Clone, Default)]
pub struct Found {
    pub names: Vec<u8>,
    pub partitions: Vec<Partition>,
    topic: (usize, usize),
    index: i32,
}

impl Found {
    pub fn clear(&mut self) {
        self.names.clear();
        self.partitions.clear();
        self.topic = (0, 0);
        self.index = 0;
    }

    pub fn topic(&self, partition: &Partition) -> &[u8] {
        &self.names[partition.topic.0..partition.topic.1]
    }
}

/// A plain response: others of its size that differ from it in free bytes alone are plain too.
#[derive(Default)]
pub struct Shape {
    bytes: Vec<u8>,
    mask: Vec<u8>, // 0: the byte is free, since no operation depends on its value
}

impl Shape {
    pub fn fits(&self, bytes: &[u8]) -> bool {
        let pairs = bytes.iter().zip(&self.bytes).zip(&self.mask);
        bytes.len() == self.bytes.len() && pairs.fold(0, |found, ((one, other), mask)| found | (one ^ other) & mask) == 0
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    operations_left: u32,
    found: &'a mut Found,
    mask: Option<&'a mut [u8]>,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(count)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    /// Takes bytes whose values nothing depends on.
    fn skip(&mut self, count: usize) -> Option<()> {
        self.take(count)?;
        if let Some(mask) = &mut self.mask {
            mask[self.at - count..self.at].fill(0);
        }
        Some(())
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An unsigned varint of at most five bytes.
    fn uvarint(&mut self) -> Option<u32> {
        let mut value: u64 = 0;
        for shift in [0, 7, 14, 21, 28] {
            let byte = *self.take(1)?.first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).ok();
            }
        }
        None
    }

    /// A length or count: Some(None) is null.
    fn length(&mut self, width: u32) -> Option<Option<usize>> {
        let length = match width {
            0 => i64::from(self.uvarint()?) - 1,
            2 => {
                let raw = self.take(2)?;
                i64::from(i16::from_be_bytes([raw[0], raw[1]]))
            }
            _ => {
                let raw = self.take(4)?;
                i64::from(i32::from_be_bytes([raw[0], raw[1], raw[2], raw[3]]))
            }
        };
        Some(usize::try_from(length).ok())
    }

    fn collect(&mut self, count: usize) -> Option<()> {
        let taken = self.take(count)?;
        let start = self.found.names.len();
        if start + count > MAX_NAMES {
            return None;
        }
        self.found.names.extend_from_slice(taken);
        self.found.topic = (start, start + count);
        Some(())
    }

    fn add(&mut self, partition: Partition) -> Option<()> {
        let found = &mut self.found;
        let is_same = |one: &Partition| {
            one.index == partition.index && found.names[one.topic.0..one.topic.1] == found.names[found.topic.0..found.topic.1]
        };
        if found.partitions.len() >= MAX_PARTITIONS || found.partitions.iter().any(is_same) {
            return None;
        }
        found.partitions.push(partition);
        Some(())
    }

    /// Adds up complete batches of magic 2 without control records; all other records are Python's.
    fn records(&mut self, bytes: usize) -> Option<()> {
        let mut left = self.take(bytes)?;
        let (mut batches, mut records, mut codecs) = (0, 0, 0);
        while !left.is_empty() {
            self.operations_left = self.operations_left.checked_sub(1)?;
            let header = left.get(..BATCH_HEADER)?;
            let length = i32::from_be_bytes([header[8], header[9], header[10], header[11]]);
            let attributes = u16::from_be_bytes([header[21], header[22]]);
            let count = i32::from_be_bytes([header[57], header[58], header[59], header[60]]);
            let size = usize::try_from(length).ok()?.checked_add(BATCH_START)?;
            if header[16] != 2 || attributes & CONTROL != 0 || count < 0 || size < BATCH_HEADER {
                return None;
            }
            left = left.get(size..)?;
            batches += 1;
            records += i64::from(count);
            codecs |= 1 << (attributes & 7);
        }
        let (topic, index) = (self.found.topic, self.found.index);
        self.add(Partition { topic, index, bytes: bytes as i64, batches, records, codecs, offset: -1 })
    }

    fn run(&mut self, program: &[u32]) -> Option<()> {
        let mut at = 0;
        while at < program.len() {
            self.operations_left = self.operations_left.checked_sub(1)?;
            let operands = &program[at + 1..];
            match program[at] {
                SKIP => {
                    self.skip(operands[0] as usize)?;
                    at += 2;
                }
                ZERO => {
                    if self.take(operands[0] as usize)?.iter().any(|byte| *byte != 0) {
                        return None;
                    }
                    at += 2;
                }
                TEXT => {
                    match self.length(operands[0])? {
                        Some(length) => self.skip(length)?,
                        None if operands[1] == 0 => return None,
                        None => {}
                    }
                    at += 3;
                }
                FIXED => {
                    match self.length(operands[0])? {
                        Some(count) => self.skip(count.checked_mul(operands[2] as usize)?)?,
                        None if operands[1] == 0 => return None,
                        None => {}
                    }
                    at += 4;
                }
                EACH => {
                    let body = &operands[4..4 + operands[3] as usize];
                    match self.length(operands[0])? {
                        Some(count) => {
                            if count.checked_mul(operands[2] as usize)? > self.left() {
                                return None;
                            }
                            for _ in 0..count {
                                self.run(body)?;
                            }
                        }
                        None if operands[1] == 0 => return None,
                        None => {}
                    }
                    at += 5 + body.len();
                }
                EMPTY => {
                    match self.length(operands[0])? {
                        Some(0) => {}
                        None if operands[1] != 0 => {}
                        _ => return None,
                    }
                    at += 3;
                }
                MAYBE => {
                    let body = &operands[2..2 + operands[1] as usize];
                    let marker = *self.take(1)?.first()? as i8;
                    if i32::from(marker) >= operands[0] as i32 {
                        self.run(body)?;
                    }
                    at += 3 + body.len();
                }
                TAGS => {
                    let listed = &operands[1..1 + operands[0] as usize];
                    let count = self.uvarint()? as usize;
                    if count.checked_mul(2)? > self.left() {
                        return None;
                    }
                    self.operations_left = self.operations_left.checked_sub(u32::try_from(count).ok()?)?;
                    for _ in 0..count {
                        let tag = self.uvarint()?;
                        if listed.contains(&tag) {
                            return None;
                        }
                        let size = self.uvarint()? as usize;
                        self.skip(size)?;
                    }
                    at += 2 + listed.len();
                }
                NAME => {
                    let length = self.length(operands[0])?;
                    if length.is_none() && operands[1] == 0 {
                        return None;
                    }
                    let marker = length.map_or(0, |length| length as u64 + 1) as u32;
                    self.found.names.extend_from_slice(&marker.to_be_bytes());
                    self.collect(length.unwrap_or(0))?;
                    at += 3;
                }
                ID => {
                    self.collect(operands[0] as usize)?;
                    at += 2;
                }
                PARTITION => {
                    let raw = self.take(4)?;
                    self.found.index = i32::from_be_bytes([raw[0], raw[1], raw[2], raw[3]]);
                    at += 1;
                }
                RECORDS => {
                    match self.length(operands[0])? {
                        Some(0) => {}
                        Some(length) => self.records(length)?,
                        None if operands[1] == 0 => return None,
                        None => {}
                    }
                    at += 3;
                }
                OFFSET => {
                    let raw = self.take(8)?.try_into().ok()?;
                    let (topic, index, offset) = (self.found.topic, self.found.index, i64::from_be_bytes(raw));
                    self.add(Partition { topic, index, bytes: 0, batches: 0, records: 0, codecs: 0, offset })?;
                    at += 1;
                }
                _ => return None,
            }
        }
        Some(())
    }
}

/// Whether all of a response behind its correlation id is plain.
pub fn is_plain(program: &[u32], bytes: &[u8]) -> bool {
    collects(program, bytes, &mut Found::default())
}

/// Whether all of a frame behind its correlation id fits a program; `found` gets what the program collects.
pub fn collects(program: &[u32], bytes: &[u8], found: &mut Found) -> bool {
    found.clear();
    let mut reader = Reader { bytes, at: 0, operations_left: MOST_OPERATIONS, found, mask: None };
    reader.run(program).is_some() && reader.left() == 0
}

/// The shape of a response; None: it is not plain.
pub fn shape_of(program: &[u32], bytes: &[u8]) -> Option<Shape> {
    let mut mask = vec![0xff; bytes.len()];
    let mut found = Found::default();
    let mask_of = Some(mask.as_mut_slice());
    let mut reader = Reader { bytes, at: 0, operations_left: MOST_OPERATIONS, found: &mut found, mask: mask_of };
    reader.run(program)?;
    (reader.left() == 0).then(|| Shape { bytes: bytes.to_vec(), mask })
}

/// Checks a program before its first use, so that running it never reads beyond it: each operation is known and whole.
pub fn is_sound(program: &[u32]) -> bool {
    let mut at = 0;
    while at < program.len() {
        let operands = &program[at + 1..];
        let (fixed, body, nested) = match program[at] {
            PARTITION | OFFSET => (0, 0, false),
            SKIP | ZERO | ID => (1, 0, false),
            TEXT | EMPTY | NAME | RECORDS => (2, 0, false),
            FIXED => (3, 0, false),
            EACH => (4, operands.get(3).copied().unwrap_or(0) as usize, true),
            MAYBE => (2, operands.get(1).copied().unwrap_or(0) as usize, true),
            TAGS => (1, operands.first().copied().unwrap_or(0) as usize, false),
            _ => return false,
        };
        if operands.len() < fixed || operands.len() - fixed < body {
            return false;
        }
        if nested && !is_sound(&operands[fixed..fixed + body]) {
            return false;
        }
        // An element of no bytes would let a count of 2^31 loop without reading anything.
        if program[at] == EACH && operands[2] == 0 {
            return false;
        }
        at += 1 + fixed + body;
    }
    true
}
