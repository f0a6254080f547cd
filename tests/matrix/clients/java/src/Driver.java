// The driver of Kafka's own clients: see README.md of the folder above. Compiled once for each release.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;

public class Driver {
  static final int GIVE_UP_S = 45;

  static JsonNode job;
  static PrintStream output;
  static int count;
  static long deadline;

  public static void main(String[] arguments) throws Exception {
    job = new ObjectMapper().readTree(Paths.get(arguments[0]).toFile());
    output = new PrintStream(Files.newOutputStream(Paths.get(text("output"))), true);
    deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(GIVE_UP_S);
    switch (text("mode")) {
      case "groups":
        produce(new HashMap<>(), false);
        consume(text("topic"), new HashMap<>(), 1);
        consume(text("topic"), new HashMap<>(), 2);
        break;
      case "transactions":
        transactions();
        break;
      case "streams":
        streams();
        break;
      default: // "share": a class that only Kafka 4 has
        produce(new HashMap<>(), false);
        ((Runnable) Class.forName("Share").getDeclaredConstructor().newInstance()).run();
    }
    System.exit(0);
  }

  static String text(String name) {
    return job.get(name).asText();
  }

  static int wanted(int part) {
    return part == 1 ? job.get("first").asInt() : job.get("records").size();
  }

  static boolean wants(int part) {
    if (System.nanoTime() > deadline) {
      throw new IllegalStateException(count + " records after " + GIVE_UP_S + " s");
    }
    return count < wanted(part);
  }

  /** The settings of any client. */
  static Properties settings() {
    Properties settings = new Properties();
    JsonNode security = job.get("security");
    settings.put("bootstrap.servers", text("bootstrap"));
    settings.put("security.protocol", security.get("protocol").asText());
    if (security.has("truststore")) {
      settings.put("ssl.truststore.type", "PKCS12");
      settings.put("ssl.truststore.location", security.get("truststore").asText());
      settings.put("ssl.truststore.password", security.get("store_password").asText());
    }
    if (security.has("keystore")) {
      settings.put("ssl.keystore.type", "PKCS12");
      settings.put("ssl.keystore.location", security.get("keystore").asText());
      settings.put("ssl.keystore.password", security.get("store_password").asText());
      settings.put("ssl.key.password", security.get("store_password").asText());
    }
    if (security.has("mechanism")) {
      String mechanism = security.get("mechanism").asText();
      settings.put("sasl.mechanism", mechanism);
      String common = "org.apache.kafka.common.security.";
      if (mechanism.equals("OAUTHBEARER")) {
        settings.put("sasl.jaas.config", common + "oauthbearer.OAuthBearerLoginModule required;");
        settings.put("sasl.login.callback.handler.class", "TokenHandler");
      } else {
        String module = mechanism.equals("PLAIN") ? "plain.PlainLoginModule" : "scram.ScramLoginModule";
        settings.put("sasl.jaas.config", String.format("%s%s required username=\"%s\" password=\"%s\";",
            common, module, security.get("user").asText(), security.get("password").asText()));
      }
    }
    return settings;
  }

  static byte[] bytes(JsonNode hex) {
    if (hex.isNull()) {
      return null;
    }
    byte[] bytes = new byte[hex.asText().length() / 2];
    for (int i = 0; i < bytes.length; i++) {
      bytes[i] = (byte) Integer.parseInt(hex.asText().substring(2 * i, 2 * i + 2), 16);
    }
    return bytes;
  }

  static String hex(byte[] bytes) {
    StringBuilder text = new StringBuilder();
    for (byte one : bytes) {
      text.append(Character.forDigit(one >> 4 & 15, 16)).append(Character.forDigit(one & 15, 16));
    }
    return text.toString();
  }

  static ProducerRecord<byte[], byte[]> record(JsonNode record) {
    List<Header> headers = new ArrayList<>();
    for (JsonNode header : record.get("headers")) {
      headers.add(new RecordHeader(header.get(0).asText(), bytes(header.get(1))));
    }
    return new ProducerRecord<>(text("topic"), record.get("partition").asInt(), bytes(record.get("key")),
        bytes(record.get("value")), headers);
  }

  /** Produces all records with a producer for each codec; within transactions, and each record twice, if asked. */
  static void produce(Map<String, String> extra, boolean transactional) throws Exception {
    KafkaProducer<byte[], byte[]> producer = null;
    String codec = null;
    List<Future<RecordMetadata>> sent = new ArrayList<>();
    List<JsonNode> batch = new ArrayList<>();
    for (JsonNode record : job.get("records")) {
      if (!record.get("codec").asText().equals(codec)) {
        finish(producer, sent, batch, transactional);
        codec = record.get("codec").asText();
        Properties settings = settings();
        settings.putAll(extra);
        settings.put("compression.type", codec);
        settings.put("acks", "all");
        settings.put("linger.ms", "5");
        settings.put("max.request.size", "2000000");
        settings.put("max.block.ms", "30000");
        settings.put("delivery.timeout.ms", "40000");
        settings.put("request.timeout.ms", "20000");
        if (!transactional && job.get("broker").asText().startsWith("0.10")) {
          settings.put("enable.idempotence", "false"); // which is the default since 3.0 and came with 0.11
        }
        producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        if (transactional) {
          producer.initTransactions();
          producer.beginTransaction();
        }
      }
      batch.add(record);
      sent.add(producer.send(record(record)));
    }
    finish(producer, sent, batch, transactional);
  }

  static void finish(KafkaProducer<byte[], byte[]> producer, List<Future<RecordMetadata>> sent, List<JsonNode> batch,
      boolean transactional) throws Exception {
    if (producer == null) {
      return;
    }
    for (Future<RecordMetadata> future : sent) {
      future.get(GIVE_UP_S, TimeUnit.SECONDS);
    }
    if (transactional) {
      producer.commitTransaction();
      producer.beginTransaction(); // what is aborted must not be seen
      for (JsonNode record : batch) {
        producer.send(record(record));
      }
      producer.flush();
      producer.abortTransaction();
    }
    producer.close();
    sent.clear();
    batch.clear();
  }

  static void write(int part, ConsumerRecord<byte[], byte[]> record) {
    ObjectNode line = new ObjectMapper().createObjectNode();
    line.put("part", part).put("partition", record.partition()).put("offset", record.offset());
    line.put("key", record.key() == null ? null : hex(record.key())).put("value", hex(record.value()));
    ArrayNode headers = line.putArray("headers");
    for (Header header : record.headers()) {
      headers.addArray().add(header.key()).add(hex(header.value()));
    }
    output.println(line);
    count++;
  }

  static Properties consumer(Map<String, String> extra) {
    Properties settings = settings();
    settings.put("group.id", text("group"));
    settings.put("auto.offset.reset", "earliest");
    settings.put("enable.auto.commit", "false");
    settings.put("max.poll.records", "10");
    settings.putAll(extra);
    return settings;
  }

  static void consume(String topic, Map<String, String> extra, int part) {
    Properties settings = consumer(extra);
    try (KafkaConsumer<byte[], byte[]> consumer =
        new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      consumer.subscribe(List.of(topic));
      while (wants(part)) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
          write(part, record);
        }
      }
      consumer.commitSync();
    }
  }

  /** Records are committed, then the same again aborted; where the group is is committed within a transaction. */
  static void transactions() throws Exception {
    Map<String, String> transactional = Map.of("transactional.id", text("group"), "enable.idempotence", "true");
    produce(transactional, true);
    Properties settings = settings();
    settings.putAll(transactional);
    try (KafkaProducer<byte[], byte[]> producer =
            new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(
            consumer(Map.of("isolation.level", "read_committed")), new ByteArrayDeserializer(),
            new ByteArrayDeserializer())) {
      boolean knowsMembers = !job.get("guarantee").asText().equals("at_least_once"); // KIP-447
      producer.initTransactions();
      consumer.subscribe(List.of(text("topic")));
      while (wants(1)) {
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        producer.beginTransaction();
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
          write(1, record);
          offsets.put(new TopicPartition(record.topic(), record.partition()),
              new OffsetAndMetadata(record.offset() + 1));
        }
        producer.sendOffsetsToTransaction(offsets,
            knowsMembers ? consumer.groupMetadata() : new ConsumerGroupMetadata(text("group")));
        producer.commitTransaction();
      }
    }
    consume(text("topic"), Map.of("isolation.level", "read_committed"), 2);
  }

  /** A topology that copies a topic, exactly once; what it wrote is consumed. */
  static void streams() throws Exception {
    produce(new HashMap<>(), false);
    Properties settings = settings();
    settings.put("application.id", text("group") + "-streams");
    settings.put("default.key.serde", Serdes.ByteArraySerde.class);
    settings.put("default.value.serde", Serdes.ByteArraySerde.class);
    settings.put("processing.guarantee", text("guarantee"));
    settings.put("state.dir", text("folder"));
    settings.put("auto.offset.reset", "earliest");
    settings.put("producer.max.request.size", "2000000");
    settings.put("commit.interval.ms", "100");
    StreamsBuilder builder = new StreamsBuilder();
    builder.stream(text("topic")).to(text("topic") + "-out");
    KafkaStreams streams = new KafkaStreams(builder.build(), settings);
    streams.start();
    Map<String, String> committed = Map.of("isolation.level", "read_committed");
    consume(text("topic") + "-out", committed, 1);
    consume(text("topic") + "-out", committed, 2);
    streams.close(Duration.ofSeconds(20));
  }

  static {
    System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "error");
    System.setOut(new PrintStream(System.out, true, StandardCharsets.UTF_8));
  }
}
