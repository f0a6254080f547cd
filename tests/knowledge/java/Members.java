import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.PartitionInfo;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.WakeupException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Materialized;

/**
 * Members of groups in one JVM, each on a thread of its own. Each line of the input is a command in JSON: start, slow
 * (polls nothing for some seconds), topics (subscribes to others), close. Each line of the output is what a member saw.
 */
public class Members {
    static final ObjectMapper JSON = new ObjectMapper();
    static final Map<String, Member> members = new ConcurrentHashMap<>();

    public static void main(String[] arguments) throws Exception {
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = commands.readLine()) != null; ) {
            JsonNode command = JSON.readTree(line);
            String name = command.get("name").asText();
            switch (command.get("do").asText()) {
                case "start" -> members.put(name, Member.started(command));
                case "slow" -> members.get(name).slowMs = command.get("ms").asLong();
                case "topics" -> members.get(name).next = texts(command.get("topics"));
                case "close" -> members.get(name).close();
                default -> throw new IllegalArgumentException(line);
            }
        }
        Runtime.getRuntime().halt(0);
    }

    static List<String> texts(JsonNode array) {
        List<String> found = new ArrayList<>();
        array.forEach(each -> found.add(each.asText()));
        return found;
    }

    static synchronized void say(String name, String what, Object detail) {
        Map<String, Object> line = new LinkedHashMap<>();
        Instant now = Instant.now();
        line.put("time_ns", now.getEpochSecond() * 1_000_000_000L + now.getNano());
        line.put("name", name);
        line.put("what", what);
        line.put("detail", detail);
        try {
            System.out.println(JSON.writeValueAsString(line));
            System.out.flush();
        } catch (Exception fault) {
            throw new IllegalStateException(fault);
        }
    }

    abstract static class Member extends Thread {
        String name;
        Properties settings = new Properties();
        List<String> topics;
        volatile List<String> next;
        volatile long slowMs;
        volatile boolean closing;

        static Member started(JsonNode command) {
            Member member = switch (command.get("kind").asText()) {
                case "consumer" -> new Consumer();
                case "share" -> new Share();
                case "streams" -> new Streams();
                case "transactions" -> new Transactions();
                default -> throw new IllegalArgumentException(command.toString());
            };
            member.name = command.get("name").asText();
            member.topics = texts(command.get("topics"));
            member.settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
            member.settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
            command.get("settings").fields().forEachRemaining(
                each -> member.settings.put(each.getKey(), each.getValue().asText()));
            member.setDaemon(true);
            member.start();
            return member;
        }

        abstract void work() throws Exception;

        void close() throws Exception {
            closing = true;
            join();
        }

        boolean slept() throws InterruptedException {
            if (slowMs == 0) {
                return false;
            }
            long pause = slowMs;
            slowMs = 0;
            Thread.sleep(pause);
            return true;
        }

        @Override
        public void run() {
            try {
                work();
                say(name, "closed", null);
            } catch (Throwable fault) {
                say(name, "failed", fault.toString());
            }
        }

        void saw(String what, Collection<TopicPartition> partitions) {
            say(name, what, partitions.stream().map(TopicPartition::toString).sorted().toList());
        }

        ConsumerRebalanceListener listener() {
            return new ConsumerRebalanceListener() {
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) { saw("assigned", partitions); }

                public void onPartitionsRevoked(Collection<TopicPartition> partitions) { saw("revoked", partitions); }

                public void onPartitionsLost(Collection<TopicPartition> partitions) { saw("lost", partitions); }
            };
        }
    }

    static class Consumer extends Member {
        void work() throws Exception {
            try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings)) {
                consumer.subscribe(topics, listener());
                while (!closing) {
                    consumer.poll(Duration.ofMillis(100));
                    slept();
                    if (next != null) {
                        consumer.subscribe(next, listener());
                        next = null;
                    }
                }
            }
        }
    }

    static class Share extends Member {
        void work() throws Exception {
            try (KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(settings)) {
                consumer.subscribe(topics);
                while (!closing) {
                    consumer.poll(Duration.ofMillis(100));
                    slept();
                }
            }
        }
    }

    /** Counts the records of its first topic by key, in a store with a changelog. */
    static class Streams extends Member {
        void work() throws Exception {
            settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class.getName());
            settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class.getName());
            settings.put(StreamsConfig.APPLICATION_ID_CONFIG, settings.remove("group.id"));
            settings.remove("key.deserializer");
            settings.remove("value.deserializer");
            StreamsBuilder builder = new StreamsBuilder();
            builder.<byte[], byte[]>stream(topics.get(0)).groupByKey().count(Materialized.as("counts"));
            try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
                streams.setStateListener((now, before) -> say(name, "state", now.toString()));
                streams.start();
                while (!closing) {
                    Thread.sleep(100);
                }
            }
        }
    }

    /** Consumes, and produces to its topic's twin, with its offsets in the same transaction; every fifth is aborted. */
    static class Transactions extends Member {
        void work() throws Exception {
            Properties producing = new Properties();
            for (String same : List.of("bootstrap.servers", "transactional.id")) {
                producing.put(same, settings.get(same));
            }
            producing.put("client.id", settings.get("client.id") + "-producer");
            settings.remove("transactional.id");
            producing.put("key.serializer", ByteArraySerializer.class.getName());
            producing.put("value.serializer", ByteArraySerializer.class.getName());
            settings.put("enable.auto.commit", "false");
            String output = (String) settings.remove("output");
            int count = 0;
            try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings);
                    KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(producing)) {
                producer.initTransactions();
                consumer.subscribe(topics, listener());
                while (!closing) {
                    ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
                    if (records.isEmpty()) {
                        continue;
                    }
                    producer.beginTransaction();
                    Map<TopicPartition, OffsetAndMetadata> done = new HashMap<>();
                    for (ConsumerRecord<byte[], byte[]> record : records) {
                        producer.send(new ProducerRecord<>(output, record.key(), record.value()));
                        done.put(new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1));
                    }
                    producer.sendOffsetsToTransaction(done, consumer.groupMetadata());
                    if (++count % 5 == 0) {
                        producer.abortTransaction();
                    } else {
                        producer.commitTransaction();
                        Map<String, Long> told = new TreeMap<>();
                        done.forEach((partition, place) -> told.put(partition.toString(), place.offset()));
                        say(name, "committed", told);
                    }
                }
            }
        }
    }

    /** Calls itself range, and gives the last partition of the first member to the last one. */
    public static class Moved extends RangeAssignor {
        @Override
        public Map<String, List<TopicPartition>> assignPartitions(
                Map<String, List<PartitionInfo>> partitions, Map<String, Subscription> subscriptions) {
            return changed(super.assignPartitions(partitions, subscriptions), true);
        }
    }

    /** Calls itself range, and gives the last partition of the first member to the last one, too. */
    public static class Twice extends RangeAssignor {
        @Override
        public Map<String, List<TopicPartition>> assignPartitions(
                Map<String, List<PartitionInfo>> partitions, Map<String, Subscription> subscriptions) {
            return changed(super.assignPartitions(partitions, subscriptions), false);
        }
    }

    static Map<String, List<TopicPartition>> changed(Map<String, List<TopicPartition>> right, boolean moves) {
        TreeMap<String, List<TopicPartition>> wrong = new TreeMap<>();
        right.forEach((member, owned) -> wrong.put(member, new ArrayList<>(owned)));
        if (wrong.size() > 1 && !wrong.firstEntry().getValue().isEmpty()) {
            List<TopicPartition> first = wrong.firstEntry().getValue();
            TopicPartition last = first.get(first.size() - 1);
            if (moves) {
                first.remove(last);
            }
            wrong.lastEntry().getValue().add(last);
        }
        return wrong;
    }
}
